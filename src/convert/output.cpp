#include "convert/output.h"

#include <sys/stat.h>

#include <cerrno>
#include <chrono>
#include <exception>
#include <filesystem>
#include <set>
#include <utility>

#include "base/text.h"
#include "convert/container.h"
#include "convert/extras.h"
#include "convert/files.h"
#include "convert/sub_folders.h"
#include "convert/work_folder.h"
#include "loadstone/error.h"
#include "receipt/receipt_file.h"
#include "storage/new_file.h"

namespace loadstone {

namespace {

constexpr std::uint64_t release_bytes = std::uint64_t{64} << 20;

using Clock = std::chrono::steady_clock;

// Zeros where the format wants tensors to stand apart. Gives back how many bytes.
std::uint64_t write_gaps(const OutputFile& file, FileSink& sink) {
  std::uint64_t written = 0;
  std::uint64_t at = 0;
  const auto fill = [&](std::uint64_t end) {
    if (end <= at) return;
    const std::vector<std::byte> zeros(end - at);
    sink.write(file.header_bytes + at, zeros);
    written += zeros.size();
  };
  for (const OutputTensor& tensor : file.tensors) {
    fill(tensor.begin);
    at = tensor.end;
  }
  fill(file.data_bytes);
  return written;
}

}  // namespace

std::vector<std::string> output_paths(const Conversion& conversion, const std::string& target) {
  if (conversion.one_file) return {target};
  std::vector<std::string> paths;
  for (const OutputFile& file : conversion.files) paths.push_back(target + "/" + file.name);
  for (const ExtraFile& extra : conversion.extras) paths.push_back(target + "/" + extra.name);
  if (!conversion.index_name.empty()) paths.push_back(target + "/" + conversion.index_name);
  return paths;
}

std::string receipt_name(const Conversion& conversion, const std::string& target) {
  if (conversion.one_file) {
    return std::filesystem::path(target).filename().string() + std::string(receipt_suffix);
  }
  if (!conversion.is_split) return std::string(receipt_file_name);
  return conversion.stem + ".gguf" + std::string(receipt_suffix);
}

Output::Output(const Conversion& conversion, WorkFolder& work, Storage& storage,
               std::function<void()> check_sources)
    : conversion_(conversion),
      work_(work),
      reading_(storage),
      storage_(storage.writable()),
      receipts_(conversion.files.size()),
      check_sources_(std::move(check_sources)),
      files_(conversion.files.size()) {}

Output::~Output() {
  for (const File& file : files_) {
    if (file.is_made && !file.is_whole) storage_.remove(file.part_path);
  }
}

void Output::make(std::uint32_t number) {
  File& file = files_[number];
  const OutputFile& planned = conversion_.files[number];
  file.part_path = work_.unfinished(conversion_.one_file ? "file" : planned.name);
  const std::string header = container_of(conversion_.format).header(conversion_, number);
  file.sink = storage_.create(file.part_path);
  file.is_made = true;
  file.sink->reserve(planned.byte_count(), Reserve::if_cheap);
  file.sink->write(0, std::as_bytes(std::span(header)));
  bytes_written_ += header.size() + write_gaps(planned, *file.sink);
}

FileSink& Output::sink_of(std::uint32_t number) {
  const std::lock_guard lock(mutex_);
  File& file = files_[number];
  if (!file.is_made) make(number);
  return *file.sink;
}

void Output::write(std::uint32_t file, std::uint64_t offset, std::span<const std::byte> bytes) {
  FileSink& sink = sink_of(file);
  sink.write(offset, bytes);
  const bool is_due = [&] {
    const std::lock_guard lock(mutex_);
    bytes_written_ += bytes.size();
    std::uint64_t& since = files_[file].bytes_since_release;
    since += bytes.size();
    return releases_cache_ && std::exchange(since, since % release_bytes) >= release_bytes;
  }();
  if (is_due) sink.release();
}

void Output::finish(std::uint32_t number) {
  File& file = files_[number];
  FileSink& sink = sink_of(number);
  timed([&] { sink.sync(); });
  check_sources_();  // what was made of others is not handed out as good
  if (recorder_ != nullptr) note_receipt(number);
  if (releases_cache_) sink.release();
  const std::lock_guard lock(mutex_);
  file.sink.reset();
  if (conversion_.one_file) return;
  storage_.rename(file.part_path, work_.files() + "/" + conversion_.files[number].name);
  file.is_whole = true;
}

// Before the shard has its name: what is whole has a receipt.
void Output::note_receipt(std::uint32_t number) {
  const std::string& name = conversion_.files[number].name;
  const auto written = reading_.open(files_[number].part_path);
  receipts_[number] = recorder_->finish(number, name, *written);
  if (conversion_.one_file) return;
  storage_.write_whole(work_.receipt_of(number), work_.unfinished(name + ".receipt"),
                       to_json(receipts_[number]));
}

Receipt Output::whole_receipt(DigestKind kind) {
  Receipt receipt = joined_receipt(kind, receipts_);
  if (conversion_.one_file) return receipt;
  const auto add = [&](const std::string& name) {
    const auto file = reading_.open(work_.files() + "/" + name);
    receipt.outputs.push_back(receipt_of_extra(kind, name, *file));
  };
  for (const ExtraFile& extra : conversion_.extras) add(extra.name);
  if (!conversion_.index_name.empty()) add(conversion_.index_name);
  return receipt;
}

std::uint64_t Output::bytes_written() const noexcept { return bytes_written_; }
double Output::sync_seconds() const noexcept { return sync_seconds_; }

template <typename Sync>
void Output::timed(const Sync& sync) {
  {
    const std::lock_guard lock(mutex_);
    if (syncs_++ == 0) syncs_begin_ = Clock::now();
  }
  const auto ended = [&] {
    const std::lock_guard lock(mutex_);
    if (--syncs_ > 0) return;
    sync_seconds_ += std::chrono::duration<double>(Clock::now() - syncs_begin_).count();
  };
  try {
    sync();
  } catch (...) {
    ended();
    throw;
  }
  ended();
}

void Output::sync_folder(const std::string& path) {
  timed([&] { storage_.sync_folder(path); });
}

// The folders above the file `name` of `root`; `made` gets those that were not there.
void Output::make_folders(const std::string& root, const std::string& name,
                          std::vector<Named>& made) {
  for_each_folder(name, [&](const std::string& folder) {
    Named step = {.to = root + "/" + folder, .is_folder = true};
    made.reserve(made.size() + 1);
    if (storage_.make_folder(step.to)) made.push_back(std::move(step));
  });
}

// Syncs each folder below `root` that holds extras.
void Output::sync_folders(const std::string& root) {
  std::set<std::string> folders;
  for (const ExtraFile& extra : conversion_.extras) {
    for_each_folder(extra.name, [&](const std::string& folder) { folders.insert(folder); });
  }
  for (const std::string& folder : folders) sync_folder(root + "/" + folder);
}

// What is not worth being kept: an ended run may have left some.
void Output::write_beside(std::optional<DigestKind> receipt) {
  const auto place = [&](const std::string& name) {
    const std::string path = work_.files() + "/" + name;
    storage_.remove(path);
    return path;
  };
  std::vector<Named> made;  // goes with the work folder
  for (const ExtraFile& extra : conversion_.extras) {
    make_folders(work_.files(), extra.name, made);
    bytes_written_ += write_extra(storage_, extra, place(extra.name));
  }
  sync_folders(work_.files());
  const auto write_text = [&](const std::string& name, const std::string& text) {
    storage_.write_whole(place(name), work_.unfinished(name), text);
    bytes_written_ += text.size();
  };
  if (!conversion_.index_name.empty()) {
    write_text(conversion_.index_name, container_of(conversion_.format).index(conversion_));
  }
  const std::string name = receipt_name(conversion_, {});
  if (receipt) {
    write_text(name, to_json(whole_receipt(*receipt)));
  } else {
    static_cast<void>(place(name));  // an ended run's
  }
}

// An older receipt goes before the file that it is of.
std::string Output::commit_file(const TargetPlace& place, std::optional<DigestKind> receipt) {
  const std::string name = receipt_name(conversion_, place.path);
  const std::string path = place.parent + "/" + name;
  std::string text;
  if (receipt) {
    receipts_.front().outputs.front().path = std::filesystem::path(place.path).filename().string();
    text = to_json(whole_receipt(*receipt));
  }
  if (is_receipt_file(path)) storage_.remove(path);
  storage_.rename(files_.front().part_path, place.path);
  files_.front().is_whole = true;
  if (receipt) {
    storage_.write_whole(path, work_.unfinished("receipt"), text);
    bytes_written_ += text.size();
  }
  return path;
}

std::vector<std::string> Output::commit(const std::string& target,
                                        std::optional<DigestKind> receipt) {
  const TargetPlace place = look_at_target(conversion_, target);  // it may be another one by now
  if (conversion_.one_file) {
    const std::string beside = commit_file(place, receipt);
    sync_folder(place.parent);
    work_.remove();
    if (receipt) return {place.path, beside};
    return {place.path};
  }
  write_beside(receipt);
  sync_folder(work_.files());
  if (!place.has_files) {
    storage_.rename(work_.files(), place.path);  // the one moment: an empty folder is replaced
    sync_folder(place.parent);
  } else if (place.is_exchangeable) {
    exchange_folders(place);
    sync_folder(place.parent);
  } else {
    name_in_folder(place);
    sync_folders(place.path);
    sync_folder(place.path);
  }
  work_.remove();
  auto paths = output_paths(conversion_, place.path);
  if (receipt) paths.push_back(place.path + "/" + receipt_name(conversion_, {}));
  return paths;
}

// First of all, so that a file system that cannot do it says so before the work is done.
void Output::check_links(const TargetPlace& place) const {
  if (!place.is_exchangeable) return;
  for (const std::string& name : place.others) {
    const std::string from = place.path + "/" + name;
    const std::string to = work_.unfinished("link");
    storage_.link(from, to);
    storage_.remove(to);
  }
}

void Output::require_own_files(const std::string& target) const {
  if (conversion_.one_file) return;
  // An ended run has linked files of the target that stay. Its folder may be back only now.
  const TargetPlace place = look_at_target(conversion_, target);
  std::set<std::string> own(place.others.begin(), place.others.end());
  for (const std::string& path : output_paths(conversion_, {})) own.insert(path.substr(1));
  own.insert(receipt_name(conversion_, {}));
  std::vector<std::string> foreign = paths_below(work_.files());
  std::erase_if(foreign, [&](const std::string& name) {
    return own.contains(name) || name.starts_with('.');  // systems leave these
  });
  if (foreign.empty()) return;
  throw Error("convert.state",
              "the folder of the work holds files that this conversion does not write: remove them",
              {.path = work_.files(), .found = name_list(foreign)});
}

// What stays stands in both folders from now on.
void Output::link_others(const TargetPlace& place) {
  for (const std::string& name : place.others) {
    // An older receipt says nothing of this output.
    if (is_extra_name(conversion_, name) || name == receipt_name(conversion_, {})) continue;
    const std::string from = place.path + "/" + name;
    const std::string to = work_.files() + "/" + name;
    if (same_file(from, to)) continue;  // an ended run did that
    storage_.remove(to);
    storage_.link(from, to);
  }
  const auto status = status_of(place.path, false);
  if (status) static_cast<void>(::chmod(work_.files().c_str(), status->st_mode & 07777));
}

void Output::exchange_folders(const TargetPlace& place) {
  link_others(place);
  sync_folder(work_.files());
  work_.note_exchange(place.path);
  const std::string& files = work_.files();
  bool is_exchanged = false;
  try {
    is_exchanged = storage_.exchange(files, place.path);
    if (!is_exchanged) storage_.rename(place.path, work_.old());
  } catch (...) {
    work_.forget_exchange();
    throw;
  }
  if (is_exchanged) return;
  // A file system without that: for a moment nothing has the name. Where this run ends then, the
  // next one gives it back to the old folder first of all.
  try {
    storage_.rename(files, place.path);
  } catch (...) {
    work_.put_back_old();
    work_.forget_exchange();
    throw;
  }
  storage_.rename(work_.old(), files);  // where the work folder removes what is known
}

// Beside files that stay. The index comes last, so that until then no shard is one of a whole.
void Output::name_in_folder(const TargetPlace& place) {
  std::vector<Named> named;
  try {
    for (const OutputFile& file : conversion_.files) {
      name_shard(work_.files() + "/" + file.name, place.path + "/" + file.name, named);
    }
    for (const ExtraFile& extra : conversion_.extras) {
      make_folders(place.path, extra.name, named);
      name_extra(work_.files() + "/" + extra.name, place.path + "/" + extra.name, named);
    }
    const std::string& index = conversion_.index_name;
    if (!index.empty()) {
      name_shard(work_.files() + "/" + index, place.path + "/" + index, named);
    }
    const std::string receipt = receipt_name(conversion_, {});
    if (status_of(work_.files() + "/" + receipt, false)) {
      name_extra(work_.files() + "/" + receipt, place.path + "/" + receipt, named);
    }
  } catch (...) {
    take_back(named);
    throw;
  }
}

// In the place of an older one, which can be put back.
void Output::name_extra(const std::string& from, const std::string& to, std::vector<Named>& named) {
  Named step = {.from = from, .to = to};
  named.reserve(named.size() + 1);
  if (status_of(to, false)) {
    step.is_exchanged = storage_.exchange(from, to);
    if (!step.is_exchanged) {
      step.from = work_.unfinished("older");
      step.is_saved = true;
      storage_.link(to, step.from);
      storage_.rename(from, to);
    }
  } else {
    storage_.rename(from, to);
    step.is_moved = true;
  }
  named.push_back(std::move(step));
}

// Beside what is there; without a step in which a shard has two names where links are not known.
void Output::name_shard(const std::string& from, const std::string& to, std::vector<Named>& named) {
  Named step = {.from = from, .to = to};
  named.reserve(named.size() + 1);
  const int problem = storage_.try_link(from, to);
  if (problem == EEXIST) {
    if (same_file(from, to)) return;  // an ended run did that
    fail_write(EEXIST, "cannot give the file its name", to);
  }
  if (problem != 0) {
    storage_.rename(from, to);
    step.is_moved = true;
  }
  named.push_back(std::move(step));
}

void Output::take_back(const std::vector<Named>& named) noexcept {
  for (auto step = named.rbegin(); step != named.rend(); ++step) {
    try {
      if (step->is_folder) {
        storage_.remove_folder(step->to);
      } else if (step->is_saved) {
        storage_.rename(step->from, step->to);
      } else if (step->is_exchanged) {
        static_cast<void>(storage_.exchange(step->from, step->to));
      } else if (step->is_moved) {
        storage_.rename(step->to, step->from);
      } else {
        storage_.remove(step->to);
      }
    } catch (const std::exception&) {
      continue;  // the first failure is told; the other steps are taken back all the same
    }
  }
}

}  // namespace loadstone
