
#include "convert/write/output.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <set>
#include <utility>

#include "base/text.h"
#include "catalog/paths.h"
#include "convert/write/container.h"
#include "convert/write/extras.h"
#include "convert/write/files.h"
#include "convert/write/finished.h"
#include "convert/write/target.h"
#include "convert/write/work_folder.h"
#include "loadstone/error.h"
#include "receipt/configs.h"
#include "receipt/receipt_file.h"
#include "storage/new_file.h"

namespace loadstone {

namespace {

constexpr std::uint64_t release_bytes = std::uint64_t{64} << 20;

// Writes the zero padding between tensors that the format requires. Returns the number of bytes.
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

// Syncs each folder below `root` that contains companion files.
void sync_folders(const Conversion& conversion, WritableStorage& storage, const std::string& root,
                  SyncClock& clock) {
  std::set<std::string> folders;
  for (const ExtraFile& extra : conversion.extras) {
    for_each_folder(extra.name, [&](const std::string& folder) { folders.insert(folder); });
  }
  for (const std::string& folder : folders) clock.sync_folder(storage, root + "/" + folder);
}

// Moves finished files to their names in the target, which is a folder. This is the last transition
// of a work folder; see docs/design/work-folder.md. Not thread-safe.
class Commit {
 public:
  // The arguments must outlive the object.
  Commit(const Conversion& conversion, WorkFolder& work, const TargetPlace& place,
         WritableStorage& storage, SyncClock& clock)
      : conversion_(conversion), work_(work), place_(place), storage_(storage), clock_(clock) {}

  // Exchanges folders in one step if the file system and the target allow it. Otherwise renames
  // file by file, the index last. After an Error the older target is unchanged.
  void run() {
    if (!place_.has_files) {
      storage_.rename(work_.files(), place_.path);  // replaces an empty folder
      sync_folder(place_.parent);
    } else if (place_.is_exchangeable) {
      link_others();
      sync_folder(work_.files());
      work_.exchange();
      sync_folder(place_.parent);
    } else {
      try {
        move_older();
        name_files();
      } catch (...) {
        take_back();
        throw;
      }
      sync_folders(conversion_, storage_, place_.path, clock_);
      sync_folder(place_.path);
      work_.forget_older();
    }
  }

 private:
  void sync_folder(const std::string& path) { clock_.sync_folder(storage_, path); }

  // Links files that stay in the target into the new folder, so that both folders have them.
  void link_others() {
    for (const std::string& name : place_.others) {
      // Skip an older receipt, because it does not describe this output.
      if (is_extra_name(conversion_, name) || name == receipt_name(conversion_, {})) continue;
      const std::string from = place_.path + "/" + name;
      const std::string to = work_.files() + "/" + name;
      if (same_file(storage_, from, to)) continue;  // an interrupted run has linked it
      storage_.remove(to);
      storage_.link(from, to);
    }
    if (const auto status = storage_.status(place_.path)) {
      storage_.permit(work_.files(), status->permissions);
    }
  }

  // Moves an older output out of the target, the index first, because without an index the shards
  // are not a model.
  void move_older() {
    if (place_.older.empty()) return;
    step([&] { return storage_.make_folder(work_.older()); },
         [this] { storage_.remove_folder(work_.older()); });
    std::vector<std::string> names = place_.older;
    const std::string_view suffix = container_of(conversion_.format).suffix();
    std::ranges::stable_partition(names,
                                  [&](const std::string& name) { return !name.ends_with(suffix); });
    for (const std::string& name : names) {
      const std::string from = place_.path + "/" + name;
      const std::string to = work_.older() + "/" + name;
      rename(from, to, [=, this] { storage_.rename(to, from); });
    }
    sync_folder(work_.older());
  }

  // Moves files into the target, whose other files stay. The index or the last shard comes last,
  // because it completes the model.
  void name_files() {
    for (const ExtraFile& extra : conversion_.extras) {
      for_each_folder(extra.name, [&](const std::string& name) {
        const std::string folder = place_.path + "/" + name;
        step([&] { return storage_.make_folder(folder); },
             [=, this] { storage_.remove_folder(folder); });
      });
      name_companion(extra.name);
    }
    const std::string receipt = receipt_name(conversion_, {});
    if (storage_.status(work_.files() + "/" + receipt)) name_companion(receipt);
    for (const OutputFile& file : conversion_.files) name_shard(file.name);
    if (!conversion_.index_name.empty()) name_shard(conversion_.index_name);
  }

  // Moves a companion file to its name. An undo step can restore an older file of this name.
  void name_companion(const std::string& name) {
    const std::string from = work_.files() + "/" + name;
    const std::string to = place_.path + "/" + name;
    const auto move_back = [=, this] { storage_.rename(to, from); };
    if (!storage_.status(to)) return rename(from, to, move_back);
    const auto exchange = [=, this] { return storage_.exchange(from, to); };
    if (step(exchange, exchange)) return;
    const std::string older = work_.unfinished("older");
    storage_.link(to, older);
    rename(from, to, [=, this] { storage_.rename(older, to); });
  }

  // Gives a shard its name: by a link, or by a rename if the file system has no links.
  void name_shard(const std::string& name) {
    const std::string from = work_.files() + "/" + name;
    const std::string to = place_.path + "/" + name;
    int problem = 0;
    const auto link = [&] { return (problem = storage_.try_link(from, to)) == 0; };
    if (step(link, [=, this] { storage_.remove(to); })) return;
    if (problem != EEXIST) return rename(from, to, [=, this] { storage_.rename(to, from); });
    if (same_file(storage_, from, to)) return;  // an interrupted run has linked it
    fail_write(EEXIST, "the system cannot rename the file to its final name", to);
  }

  void rename(const std::string& from, const std::string& to, std::function<void()> undo) {
    step([&] { return storage_.rename(from, to), true; }, std::move(undo));
  }

  // Returns true if the step succeeded, and then records how to undo it.
  template <typename Step>
  bool step(const Step& act, std::function<void()> undo) {
    undo_.reserve(undo_.size() + 1);
    if (!act()) return false;
    undo_.push_back(std::move(undo));
    return true;
  }

  // Undoes all steps in reverse order. Ignores errors, so that run() reports the first failure.
  void take_back() noexcept {
    for (auto undo = undo_.rbegin(); undo != undo_.rend(); ++undo) {
      try {
        (*undo)();
      } catch (const std::exception&) {
        continue;
      }
    }
  }

  const Conversion& conversion_;
  WorkFolder& work_;
  const TargetPlace& place_;
  WritableStorage& storage_;
  SyncClock& clock_;
  std::vector<std::function<void()>> undo_;  // undo functions of name_files()
};

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
    return std::string(file_name(target)) + std::string(receipt_suffix);
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
  syncs_.timed([&] { sink.sync(); });
  check_sources_();  // an output from changed sources must not be completed
  if (recorder_ != nullptr) note_receipt(number);
  if (releases_cache_) sink.release();
  const std::lock_guard lock(mutex_);
  file.sink.reset();
  if (conversion_.one_file) return;
  storage_.rename(file.part_path, work_.files() + "/" + conversion_.files[number].name);
  file.is_whole = true;
}

// Writes a shard's receipt. Called before the shard gets its name, so that every complete shard has
// a receipt.
void Output::note_receipt(std::uint32_t number) {
  const std::string& name = conversion_.files[number].name;
  const auto written = reading_.open(files_[number].part_path);
  receipts_[number] = recorder_->finish(number, *written);
  if (conversion_.one_file) return;
  storage_.write_whole(work_.receipt_of(number), work_.unfinished(name + ".receipt"),
                       to_json(receipts_[number]));
}

Receipt Output::whole_receipt(DigestKind kind) {
  Receipt receipt = joined_receipt(kind, receipts_);
  add_configs(receipt, *conversion_.plan.catalog, reading_);
  if (conversion_.one_file) return receipt;
  const auto add = [&](const std::string& name) {
    const auto file = reading_.open(work_.files() + "/" + name);
    receipt.outputs.push_back(whole_file(kind, name, *file));
  };
  for (const ExtraFile& extra : conversion_.extras) add(extra.name);
  if (!conversion_.index_name.empty()) add(conversion_.index_name);
  return receipt;
}

// Writes companion files, the index and the receipt. Replaces files that an interrupted run left.
void Output::write_beside(std::optional<DigestKind> receipt) {
  const auto place = [&](const std::string& name) {
    const std::string path = work_.files() + "/" + name;
    storage_.remove(path);
    return path;
  };
  for (const ExtraFile& extra : conversion_.extras) {
    for_each_folder(extra.name, [&](const std::string& folder) {
      storage_.make_folder(work_.files() + "/" + folder);
    });
    bytes_written_ += write_extra(storage_, extra, place(extra.name));
  }
  sync_folders(conversion_, storage_, work_.files(), syncs_);
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
    static_cast<void>(place(name));  // remove the receipt of an interrupted run
  }
}

// Commits a single file. Replaces an older receipt before the file that the receipt describes.
std::string Output::commit_file(const TargetPlace& place, std::optional<DigestKind> receipt) {
  const std::string name = receipt_name(conversion_, place.path);
  const std::string path = place.parent + "/" + name;
  std::string text;
  if (receipt) {
    receipts_.front().outputs.front().path = file_name(place.path);
    text = to_json(whole_receipt(*receipt));
  }
  if (is_receipt_file(storage_, path)) storage_.remove(path);
  storage_.rename(files_.front().part_path, place.path);
  files_.front().is_whole = true;
  if (receipt) {
    storage_.write_whole(path, work_.unfinished("receipt"), text);
    bytes_written_ += text.size();
  }
  return path;
}

std::vector<std::string> Output::commit(const std::string& target, const ConvertRun& run) {
  const auto& receipt = run.receipt;
  // Other processes may have changed the target.
  const TargetPlace place = look_at_target(conversion_, target, storage_);
  require_replaceable(conversion_, place, run, storage_);
  const auto prepare = [&](const std::string& files) {
    prepare_record(conversion_, place, run, files, storage_);
  };
  if (conversion_.one_file) {
    prepare(files_.front().part_path);
    const std::string beside = commit_file(place, receipt);
    syncs_.sync_folder(storage_, place.parent);
    if (receipt) return {place.path, beside};
    return {place.path};
  }
  write_beside(receipt);
  prepare(work_.files());
  syncs_.sync_folder(storage_, work_.files());
  Commit(conversion_, work_, place, storage_, syncs_).run();
  auto paths = output_paths(conversion_, place.path);
  if (receipt) paths.push_back(place.path + "/" + receipt_name(conversion_, {}));
  return paths;
}

// Called before the conversion does any work, because it fails on a file system without links.
void Output::check_links(const TargetPlace& place) const {
  if (!place.is_exchangeable) return;
  for (const std::string& name : place.others) {
    const std::string from = place.path + "/" + name;
    const std::string to = work_.unfinished("link");
    storage_.link(from, to);
    storage_.remove(to);
  }
}

void require_own_files(WritableStorage& storage, const Conversion& conversion,
                       const TargetPlace& place, const std::string& files) {
  std::set<std::string> own(place.others.begin(), place.others.end());
  for (const std::string& path : output_paths(conversion, {})) own.insert(path.substr(1));
  own.insert(receipt_name(conversion, {}));
  std::vector<std::string> foreign = paths_below(storage, files);
  std::erase_if(foreign, [&](const std::string& name) {
    return own.contains(name) || name.starts_with('.');  // files that operating systems create
  });
  if (foreign.empty()) return;
  throw Error("convert.state",
              "the work folder contains files that this conversion did not write: remove them",
              {.path = files, .found = name_list(foreign)});
}

}  // namespace loadstone
