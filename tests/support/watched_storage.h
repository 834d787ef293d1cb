// Wraps a file system, records every access, and fails on request.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "storage/forwarding.h"

namespace loadstone::test {

struct Access {
  std::string path;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;

  friend bool operator==(const Access&, const Access&) = default;
};

// Hook for reads, shared by the files and their storage. Thread-safe.
class Watch {
 public:
  void note(const std::string& path, std::uint64_t offset, std::uint64_t bytes);
  [[nodiscard]] std::vector<Access> accesses() const;
  void clear();

  // Called before each read, outside any lock; may throw, sleep, cancel.
  std::function<void(const Access&)> before_read;

 private:
  mutable std::mutex mutex_;
  std::vector<Access> accesses_;
};

// Records reads; `inner` must outlive it. Thread-safe if `inner` is.
class LoggingStorage : public ForwardingStorage {
 public:
  explicit LoggingStorage(Storage& inner)
      : ForwardingStorage(inner), watch_(std::make_shared<Watch>()) {}

  [[nodiscard]] Watch& watch() noexcept { return *watch_; }
  [[nodiscard]] std::vector<Access> accesses() const { return watch_->accesses(); }
  [[nodiscard]] std::vector<std::string> opened() const;

  [[nodiscard]] std::shared_ptr<ByteSource> open(const std::string& path) override;
  [[nodiscard]] std::shared_ptr<ByteSource> open_anew(const std::string& path) override {
    return open(path);
  }

 private:
  std::shared_ptr<Watch> watch_;
  mutable std::mutex mutex_;
  std::vector<std::string> opened_;
};

// An injected fault. A read that overlaps [offset_begin, offset_end) of a file whose path ends with
// `path_end` throws, from the `skip`-th such read on.
struct Fault {
  std::string path_end;
  std::uint64_t offset_begin = 0;
  std::uint64_t offset_end = UINT64_MAX;
  unsigned skip = 0;
  std::string code = "io.read";
  int system_error = 5;  // EIO
};

// Thread-safe if `inner` is.
class FaultyStorage final : public LoggingStorage {
 public:
  FaultyStorage(Storage& inner, Fault fault);
};

}  // namespace loadstone::test
