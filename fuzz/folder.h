// Defines a folder in memory that aborts on names outside of it.
#pragma once

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/memory_storage.h"

namespace loadstone::fuzz {

// Files below /m. Thread-safe as long as no file is added.
class Folder final : public Storage {
 public:
  void add_file(const std::string& path, std::string bytes) {
    files_.add_file(path, std::move(bytes));
  }

  [[nodiscard]] std::shared_ptr<ByteSource> open(const std::string& path) override {
    return files_.open(path);
  }
  [[nodiscard]] EntryKind kind(const std::string& path) override { return files_.kind(path); }
  [[nodiscard]] std::vector<std::string> list(const std::string& folder) override {
    return files_.list(folder);
  }
  // Aborts if loadstone resolves a name outside of the folder, because that is a defect.
  [[nodiscard]] std::string resolve(const std::string& path) override {
    if (path != "/m" && !path.starts_with("/m/")) std::abort();
    if (path.find("/../") != std::string::npos || path.ends_with("/..")) std::abort();
    return path;
  }

 private:
  test::MemoryStorage files_;
};

}  // namespace loadstone::fuzz
