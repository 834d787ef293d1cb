// Declares a file system in memory, with folders, links and named pipes.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "loadstone/storage.h"

namespace loadstone::test {

// Paths are absolute, such as "/dir/file". Thread-safe while nothing is added.
class MemoryStorage final : public Storage {
 public:
  // Adds a file and its missing folders.
  void add_file(const std::string& path, std::string bytes);
  void add_folder(const std::string& path);
  // `target` may be relative to the folder of `path`, as with ln -s.
  void add_link(const std::string& path, std::string target);
  // Adds a path that is neither a file nor a folder.
  void add_pipe(const std::string& path);
  // Makes opening the path fail with "io.denied".
  void deny(const std::string& path) { denied_.insert(path); }
  void set_modified_ns(const std::string& path, std::int64_t time) { modified_ns_[path] = time; }
  // Makes files that are opened later report a network file system.
  void move_to_network() { is_on_network_ = true; }

  [[nodiscard]] std::shared_ptr<ByteSource> open(const std::string& path) override;
  [[nodiscard]] EntryKind kind(const std::string& path) override;
  [[nodiscard]] std::vector<std::string> list(const std::string& folder) override;
  [[nodiscard]] std::string resolve(const std::string& path) override;

 private:
  std::map<std::string, std::shared_ptr<const std::string>> files_;
  std::map<std::string, std::string> links_;
  std::map<std::string, std::int64_t> modified_ns_;
  std::set<std::string> folders_ = {"/"};
  std::set<std::string> pipes_;
  std::set<std::string> denied_;
  bool is_on_network_ = false;
};

// Returns a source with these bytes.
[[nodiscard]] std::shared_ptr<ByteSource> memory_source(std::string bytes,
                                                        std::string path = "/test/file");

}  // namespace loadstone::test
