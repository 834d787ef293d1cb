#include "convert/output.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <utility>

#include "convert/extras.h"
#include "convert/files.h"
#include "convert/header.h"
#include "convert/work_folder.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

// Beside what is there; without a step in which a shard has two names where links are not known.
void name_shard(const std::string& from, const std::string& to) {
  if (::link(from.c_str(), to.c_str()) == 0) return;
  if (errno == EEXIST) {
    if (same_file(from, to)) return;  // an ended run did that
    fail_write(EEXIST, "cannot give the file its name", to);
  }
  give_name(from, to);
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

Output::Output(const Conversion& conversion, WorkFolder& work, std::function<void()> check_sources)
    : conversion_(conversion),
      work_(work),
      check_sources_(std::move(check_sources)),
      files_(conversion.files.size()) {}

Output::~Output() {
  for (const File& file : files_) {
    if (file.is_made && !file.is_whole) ::unlink(file.part_path.c_str());
  }
}

void Output::make(std::uint32_t number) {
  File& file = files_[number];
  const OutputFile& planned = conversion_.files[number];
  file.part_path = work_.unfinished(conversion_.one_file ? "file" : planned.name);
  file.descriptor = new_file(file.part_path);
  file.is_made = true;
  reserve_if_cheap(file.descriptor.get(), planned.byte_count(), file.part_path);
  const std::string header = header_text(conversion_, planned);
  write_all(file.descriptor.get(), 0, std::as_bytes(std::span(header)), file.part_path);
  bytes_written_ += header.size();
}

int Output::descriptor_of(std::uint32_t number) {
  const std::lock_guard lock(mutex_);
  File& file = files_[number];
  if (!file.is_made) make(number);
  return file.descriptor.get();
}

void Output::write(std::uint32_t file, std::uint64_t offset, std::span<const std::byte> bytes) {
  write_all(descriptor_of(file), offset, bytes, files_[file].part_path);
  const std::lock_guard lock(mutex_);
  bytes_written_ += bytes.size();
}

void Output::finish(std::uint32_t number) {
  File& file = files_[number];
  sync_file(descriptor_of(number), file.part_path);
  check_sources_();  // what was made of others is not handed out as good
  const std::lock_guard lock(mutex_);
  file.descriptor = Descriptor();
  if (conversion_.one_file) return;
  give_name(file.part_path, work_.files() + "/" + conversion_.files[number].name);
  file.is_whole = true;
}

std::uint64_t Output::bytes_written() const noexcept { return bytes_written_; }

// What is not worth being kept: an ended run may have left some.
void Output::write_beside() {
  const auto place = [&](const std::string& name) {
    const std::string path = work_.files() + "/" + name;
    ::unlink(path.c_str());
    return path;
  };
  for (const ExtraFile& extra : conversion_.extras) {
    bytes_written_ += write_extra(extra, place(extra.name));
  }
  if (conversion_.index_name.empty()) return;
  const std::string text = index_text(conversion_);
  write_whole(place(conversion_.index_name), work_.unfinished(conversion_.index_name), text);
  bytes_written_ += text.size();
}

std::vector<std::string> Output::commit(const std::string& target) {
  const TargetPlace place = look_at_target(conversion_, target);  // it may be another one by now
  if (conversion_.one_file) {
    give_name(files_.front().part_path, place.path);
    files_.front().is_whole = true;
    sync_folder(place.parent);
    work_.remove();
    return {place.path};
  }
  write_beside();
  sync_folder(work_.files());
  if (!place.has_files) {
    give_name(work_.files(), place.path);  // the one moment: an empty folder is replaced
    sync_folder(place.parent);
  } else if (place.is_exchangeable) {
    exchange_folders(place);
    sync_folder(place.parent);
  } else {
    name_in_folder(place);
    sync_folder(place.path);
  }
  work_.remove();
  return output_paths(conversion_, place.path);
}

// First of all, so that a file system that cannot do it says so before the work is done.
void Output::check_links(const TargetPlace& place) const {
  if (!place.is_exchangeable) return;
  for (const std::string& name : place.others) {
    const std::string from = place.path + "/" + name;
    const std::string to = work_.unfinished("link");
    if (::link(from.c_str(), to.c_str()) != 0) fail_write(errno, "cannot keep the file", from);
    ::unlink(to.c_str());
  }
}

// What stays stands in both folders from now on.
void Output::link_others(const TargetPlace& place) {
  for (const std::string& name : place.others) {
    if (is_extra_name(conversion_, name)) continue;
    const std::string from = place.path + "/" + name;
    const std::string to = work_.files() + "/" + name;
    if (same_file(from, to)) continue;  // an ended run did that
    ::unlink(to.c_str());
    if (::link(from.c_str(), to.c_str()) != 0) fail_write(errno, "cannot keep the file", from);
  }
  const auto status = status_of(place.path, false);
  if (status) static_cast<void>(::chmod(work_.files().c_str(), status->st_mode & 07777));
}

void Output::exchange_folders(const TargetPlace& place) {
  link_others(place);
  sync_folder(work_.files());
  work_.note_exchange(place.path);
  const char* const path = place.path.c_str();
  const std::string& files = work_.files();
  if (::renameat2(AT_FDCWD, files.c_str(), AT_FDCWD, path, RENAME_EXCHANGE) == 0) return;
  if (errno != EINVAL && errno != ENOSYS) {
    const int problem = errno;
    work_.forget_exchange();
    fail_write(problem, "cannot put the new folder in the place of the old one", place.path);
  }
  // A file system without that: for a moment nothing has the name.
  const std::string old = place.parent + "/" + unique_part_name();
  give_name(place.path, old);
  if (::rename(files.c_str(), path) != 0) {
    const int problem = errno;
    give_name(old, place.path);
    work_.forget_exchange();
    fail_write(problem, "cannot give the folder its name", place.path);
  }
  give_name(old, files);  // where the work folder removes what is known
}

// Beside files that stay. The index comes last, so that until then no shard is one of a whole.
void Output::name_in_folder(const TargetPlace& place) {
  for (const ExtraFile& extra : conversion_.extras) {
    give_name(work_.files() + "/" + extra.name, place.path + "/" + extra.name);
  }
  for (const OutputFile& file : conversion_.files) {
    name_shard(work_.files() + "/" + file.name, place.path + "/" + file.name);
  }
  const std::string& index = conversion_.index_name;
  if (!index.empty()) name_shard(work_.files() + "/" + index, place.path + "/" + index);
}

}  // namespace loadstone
