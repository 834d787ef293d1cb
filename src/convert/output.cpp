#include "convert/output.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>

#include "base/text.h"
#include "convert/header.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

void sync(int descriptor, const std::string& path) {
  if (::fsync(descriptor) != 0) fail_write(errno, "cannot bring the file to the disk", path);
}

// So that the names in it are on the disk too.
void sync_folder(const std::string& path) {
  const Descriptor folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() < 0) fail_write(errno, "cannot open the folder", path);
  // Some file systems cannot do that to a folder; what is renamed there is safe all the same.
  if (::fsync(folder.get()) != 0 && errno != EINVAL) {
    fail_write(errno, "cannot bring the folder to the disk", path);
  }
}

void write_all(int descriptor, std::uint64_t offset, std::span<const std::byte> bytes,
               const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t count =
        ::pwrite(descriptor, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) fail_write(count < 0 ? errno : ENOSPC, "cannot write the file", path);
    bytes = bytes.subspan(static_cast<std::size_t>(count));
    offset += static_cast<std::uint64_t>(count);
  }
}

void give_name(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) {
    fail_write(errno, "cannot give the file its name", to);
  }
}

}  // namespace

Output::Output(const Conversion& conversion, TargetPlace place)
    : conversion_(conversion), place_(std::move(place)), files_(conversion.files.size()) {
  folder_ = place_.parent;
  if (!conversion.one_file) {
    folder_ = place_.path;
    if (!place_.has_files || place_.is_exchangeable) {
      part_folder_ = place_.parent + "/" + unique_part_name();
      if (::mkdir(part_folder_.c_str(), 0777) != 0) {
        fail_write(errno, "cannot make the folder", place_.path);
      }
      folder_ = part_folder_;
      try {
        link_others();
      } catch (...) {
        remove_all();
        throw;
      }
    }
  }
  for (std::size_t i = 0; i < files_.size(); ++i) {
    File& file = files_[i];
    file.name = conversion.one_file ? std::filesystem::path(place_.path).filename().string()
                                    : conversion.files[i].name;
    file.part_path = folder_ + "/" + (part_folder_.empty() ? unique_part_name() : file.name);
  }
}

Output::~Output() {
  if (!committed_) remove_all();
}

void Output::make(File& file, std::uint64_t byte_count) {
  file.descriptor =
      Descriptor(::open(file.part_path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (file.descriptor.get() < 0) fail_write(errno, "cannot make the file", file.part_path);
  file.is_made = true;
  reserve_if_cheap(file.descriptor.get(), byte_count, file.part_path);
}

int Output::descriptor_of(std::uint32_t number) {
  const std::lock_guard lock(mutex_);
  File& file = files_[number];
  if (!file.is_made) {
    const OutputFile& planned = conversion_.files[number];
    make(file, planned.byte_count());
    const std::string header = header_text(conversion_, planned);
    write_all(file.descriptor.get(), 0, std::as_bytes(std::span(header)), file.part_path);
    bytes_written_ += header.size();
  }
  return file.descriptor.get();
}

void Output::write(std::uint32_t file, std::uint64_t offset, std::span<const std::byte> bytes) {
  write_all(descriptor_of(file), offset, bytes, files_[file].part_path);
  const std::lock_guard lock(mutex_);
  bytes_written_ += bytes.size();
}

void Output::finish(std::uint32_t file) {
  sync(descriptor_of(file), files_[file].part_path);
  const std::lock_guard lock(mutex_);
  files_[file].descriptor = Descriptor();
}

std::uint64_t Output::bytes_written() const noexcept { return bytes_written_; }

void Output::write_index() {
  const std::string text = index_text(conversion_);
  File& file = files_.emplace_back();
  file.name = conversion_.index_name;
  file.part_path = folder_ + "/" + (part_folder_.empty() ? unique_part_name() : file.name);
  make(file, text.size());
  write_all(file.descriptor.get(), 0, std::as_bytes(std::span(text)), file.part_path);
  sync(file.descriptor.get(), file.part_path);
  file.descriptor = Descriptor();
  bytes_written_ += text.size();
}

std::vector<std::string> Output::commit() {
  if (!conversion_.index_name.empty()) write_index();
  std::vector<std::string> paths;
  if (!part_folder_.empty()) {
    sync_folder(part_folder_);
    if (place_.is_exchangeable) {
      exchange_folders();
    } else {
      give_name(part_folder_, place_.path);  // the one moment: an empty folder is replaced
    }
    committed_ = true;
    sync_folder(place_.parent);
  } else {
    name_in_folder();
    committed_ = true;
    sync_folder(folder_);
  }
  for (const File& file : files_) {
    paths.push_back(conversion_.one_file ? place_.path : place_.path + "/" + file.name);
  }
  return paths;
}

// What stays stands in both folders from now on. First of all, so that a file system that cannot do
// it says so before the work is done.
void Output::link_others() {
  for (const std::string& name : place_.others) {
    const std::string from = place_.path + "/" + name;
    const std::string to = part_folder_ + "/" + name;
    if (::link(from.c_str(), to.c_str()) != 0) fail_write(errno, "cannot keep the file", from);
    links_.push_back(to);
  }
  struct stat status {};
  if (::stat(place_.path.c_str(), &status) == 0) {
    static_cast<void>(::chmod(part_folder_.c_str(), status.st_mode & 07777));
  }
}

void Output::exchange_folders() {
  const char* const path = place_.path.c_str();
  std::string old = part_folder_;
  if (::renameat2(AT_FDCWD, old.c_str(), AT_FDCWD, path, RENAME_EXCHANGE) != 0) {
    if (errno != EINVAL && errno != ENOSYS) {
      fail_write(errno, "cannot put the new folder in the place of the old one", place_.path);
    }
    // A file system without that: for a moment nothing has the name.
    old = place_.parent + "/" + unique_part_name();
    give_name(place_.path, old);
    if (::rename(part_folder_.c_str(), path) != 0) {
      const int problem = errno;
      give_name(old, place_.path);
      fail_write(problem, "cannot give the folder its name", place_.path);
    }
  }
  committed_ = true;
  // The target is whole: what cannot be removed is no failure. What nobody knew of stays.
  std::error_code ignored;
  for (const std::string& name : place_.others) std::filesystem::remove(old + "/" + name, ignored);
  for (const std::string& name : place_.older) std::filesystem::remove(old + "/" + name, ignored);
  std::filesystem::remove(old, ignored);
}

// Beside files that stay. The index comes last, so that until then no shard is one of a whole.
void Output::name_in_folder() {
  for (File& file : files_) {
    give_name(file.part_path, conversion_.one_file ? place_.path : folder_ + "/" + file.name);
    file.is_named = true;
  }
}

void Output::remove_all() noexcept {
  for (File& file : files_) {
    file.descriptor = Descriptor();
    const std::string& path = file.is_named
                                  ? (conversion_.one_file ? place_.path : folder_ + "/" + file.name)
                                  : file.part_path;
    // One file that has its name is whole, and has replaced what was there.
    if (file.is_made && !(file.is_named && conversion_.one_file)) ::unlink(path.c_str());
  }
  for (const std::string& path : links_) ::unlink(path.c_str());
  if (!part_folder_.empty()) ::rmdir(part_folder_.c_str());
}

}  // namespace loadstone
