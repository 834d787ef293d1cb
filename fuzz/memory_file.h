// One file in memory as a whole file system, for the fuzz targets.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "loadstone/error.h"
#include "loadstone/storage.h"

namespace loadstone::fuzz {

// Thread-safe: it never changes.
class MemoryFile final : public ByteSource {
 public:
  MemoryFile(std::string path, std::span<const std::uint8_t> bytes)
      : path_(std::move(path)), bytes_(bytes) {}

  [[nodiscard]] const std::string& path() const noexcept override { return path_; }
  [[nodiscard]] FileIdentity identity() const override { return {bytes_.size(), 0}; }
  void read(std::uint64_t offset, std::span<const std::span<std::byte>> pieces) override {
    for (const auto piece : pieces) {
      if (offset > bytes_.size() || piece.size() > bytes_.size() - offset) {
        throw Error("io.short_read", "the file ends early", {.path = path_});
      }
      const auto from = std::as_bytes(bytes_.subspan(offset, piece.size()));
      std::copy(from.begin(), from.end(), piece.begin());
      offset += piece.size();
    }
  }

 private:
  std::string path_;
  std::span<const std::uint8_t> bytes_;
};

// Thread-safe: it never changes.
class MemoryStorage final : public Storage {
 public:
  MemoryStorage(std::string path, std::span<const std::uint8_t> bytes)
      : path_(std::move(path)), bytes_(bytes) {}

  [[nodiscard]] std::shared_ptr<ByteSource> open(const std::string& path) override {
    if (path != path_) throw Error("io.not_found", "no such file", {.path = path});
    return std::make_shared<MemoryFile>(path, bytes_);
  }
  [[nodiscard]] EntryKind kind(const std::string& path) override {
    if (path != path_) throw Error("io.not_found", "no such file", {.path = path});
    return EntryKind::file;
  }
  [[nodiscard]] std::vector<std::string> list(const std::string&) override { return {path_}; }
  [[nodiscard]] std::string resolve(const std::string& path) override { return path; }

 private:
  std::string path_;
  std::span<const std::uint8_t> bytes_;
};

}  // namespace loadstone::fuzz
