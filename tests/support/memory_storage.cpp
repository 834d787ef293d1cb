#include "support/memory_storage.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "loadstone/error.h"

namespace loadstone::test {

namespace {

class MemorySource final : public ByteSource {
 public:
  MemorySource(std::string path, std::shared_ptr<const std::string> bytes, std::int64_t modified_ns,
               bool is_on_network)
      : path_(std::move(path)),
        bytes_(std::move(bytes)),
        modified_ns_(modified_ns),
        is_on_network_(is_on_network) {}

  [[nodiscard]] const std::string& path() const noexcept override { return path_; }
  [[nodiscard]] FileIdentity identity() const override {
    return {.bytes = bytes_->size(), .modified_ns = modified_ns_};
  }
  [[nodiscard]] bool is_on_network() const override { return is_on_network_; }
  using ByteSource::read;
  void read(std::uint64_t offset, std::span<const std::span<std::byte>> pieces) override {
    for (const std::span<std::byte> piece : pieces) {
      if (offset > bytes_->size() || piece.size() > bytes_->size() - offset) {
        Where where;
        where.path = path_;
        where.byte_offset = offset;
        throw Error("io.short_read", "the file is shorter than when it was opened", where);
      }
      if (!piece.empty()) std::memcpy(piece.data(), bytes_->data() + offset, piece.size());
      offset += piece.size();
    }
  }

 private:
  std::string path_;
  std::shared_ptr<const std::string> bytes_;
  std::int64_t modified_ns_;
  bool is_on_network_;
};

std::string parent(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == 0 ? "/" : path.substr(0, slash);
}

[[noreturn]] void fail(const char* code, const char* message, const std::string& path) {
  Where where;
  where.path = path;
  throw Error(code, message, where);
}

}  // namespace

void MemoryStorage::add_folder(const std::string& path) {
  for (std::string each = path; folders_.insert(each).second;) each = parent(each);
}

void MemoryStorage::add_file(const std::string& path, std::string bytes) {
  add_folder(parent(path));
  files_[path] = std::make_shared<const std::string>(std::move(bytes));
}

void MemoryStorage::add_link(const std::string& path, std::string target) {
  add_folder(parent(path));
  links_[path] = std::move(target);
}

void MemoryStorage::add_pipe(const std::string& path) {
  add_folder(parent(path));
  pipes_.insert(path);
}

std::string MemoryStorage::resolve(const std::string& path) {
  std::string done;
  std::string rest = path;
  for (int links = 0; !rest.empty();) {
    rest.erase(0, rest.find_first_not_of('/') == std::string::npos ? rest.size()
                                                                   : rest.find_first_not_of('/'));
    const std::string part = rest.substr(0, rest.find('/'));
    rest.erase(0, part.size());
    if (part.empty() || part == ".") continue;
    if (part == "..") {
      done = done.substr(0, done.rfind('/') == std::string::npos ? 0 : done.rfind('/'));
      continue;
    }
    const std::string next = done + "/" + part;
    const auto link = links_.find(next);
    if (link == links_.end()) {
      done = next;
      continue;
    }
    if (++links > 40) fail("io.open", "too many links", path);
    if (link->second.starts_with('/')) done.clear();
    rest = link->second + rest;
  }
  if (done.empty()) done = "/";
  const bool exists = files_.contains(done) || folders_.contains(done) || pipes_.contains(done);
  if (!exists) fail("io.not_found", "there is no such file or folder", path);
  return done;
}

std::shared_ptr<ByteSource> MemoryStorage::open(const std::string& path) {
  const std::string real = resolve(path);
  if (denied_.contains(path)) fail("io.denied", "access denied", path);
  const auto found = files_.find(real);
  if (found == files_.end()) fail("io.not_regular", "the path is not a regular file", path);
  const auto time = modified_ns_.find(real);
  return std::make_shared<MemorySource>(
      path, found->second, time == modified_ns_.end() ? 0 : time->second, is_on_network_);
}

EntryKind MemoryStorage::kind(const std::string& path) {
  const std::string real = resolve(path);
  if (folders_.contains(real)) return EntryKind::folder;
  return files_.contains(real) ? EntryKind::file : EntryKind::other;
}

std::vector<std::string> MemoryStorage::list(const std::string& folder) {
  const std::string real = resolve(folder);
  if (!folders_.contains(real)) fail("io.not_found", "no such folder", folder);
  std::vector<std::string> names;
  const auto collect = [&](const std::string& path) {
    if (path != "/" && parent(path) == real) names.push_back(path.substr(path.rfind('/') + 1));
  };
  for (const auto& [path, bytes] : files_) collect(path);
  for (const auto& [path, target] : links_) collect(path);
  for (const std::string& path : folders_) collect(path);
  for (const std::string& path : pipes_) collect(path);
  std::ranges::sort(names);
  return names;
}

std::shared_ptr<ByteSource> memory_source(std::string bytes, std::string path) {
  return std::make_shared<MemorySource>(
      std::move(path), std::make_shared<const std::string>(std::move(bytes)), 0, false);
}

}  // namespace loadstone::test
