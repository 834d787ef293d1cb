// Declares storages that record every access and fail on request.
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

// Hook for reads, shared by a storage and its files. Thread-safe.
class Watch {
 public:
  void note(const std::string& path, std::uint64_t offset, std::uint64_t bytes);
  [[nodiscard]] std::vector<Access> accesses() const;
  void clear();

  // Called before each read without a lock held. May throw, sleep or cancel.
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

// A fault for reads that overlap [offset_begin, offset_end) of a file whose path ends with
// `path_end`. The first `skip` of these reads succeed, and later ones throw.
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
