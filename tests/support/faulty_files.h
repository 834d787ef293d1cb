// Declares a file system with injected faults. The faults occur below the code that retries and
// cleans up, so tests cover this code.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "storage/forwarding.h"

namespace loadstone::test {

// A system call that is about to be made.
struct FileCall {
  std::uint64_t number = 0;  // counted from 1 over all threads
  std::string_view name;     // "write", "rename" ...
  std::string path;
};

// The fault of a call: an error number, a write of only half the bytes, or std::bad_alloc.
struct FileFault {
  int problem = 0;
  bool is_short = false;
  bool is_memory = false;
};

// Wraps a file system and skips syncs. `choose` is called before each call and may end the process.
// Thread-safe if `choose` and the wrapped file system are.
class FaultyFiles final : public ForwardingStorage {
 public:
  using Choose = std::function<FileFault(const FileCall&)>;

  explicit FaultyFiles(Choose choose, Storage& inner = local_storage());
  ~FaultyFiles() override;

  [[nodiscard]] std::shared_ptr<ByteSource> open(const std::string& path) override;
  [[nodiscard]] std::shared_ptr<ByteSource> open_anew(const std::string& path) override {
    return open(path);
  }
  [[nodiscard]] EntryKind kind(const std::string& path) override;
  [[nodiscard]] std::vector<std::string> list(const std::string& folder) override;
  [[nodiscard]] std::string resolve(const std::string& path) override;
  [[nodiscard]] WritableStorage& writable() override;

  [[nodiscard]] std::uint64_t calls() const noexcept;

  class Gate;

 private:
  std::shared_ptr<Gate> gate_;
  std::unique_ptr<WritableStorage> writes_;
};

[[nodiscard]] inline FileFault no_fault(const FileCall&) { return {}; }
// Returns a function for FaultyFiles that fails only call `number`.
[[nodiscard]] FaultyFiles::Choose fail_call(std::uint64_t number, FileFault fault);

// Returns the number of open descriptors of this process.
[[nodiscard]] std::size_t open_descriptors();

// Runs `work` in a child process that is killed (SIGKILL) before call `number`. Returns false if
// the work completed.
[[nodiscard]] bool killed_at(std::uint64_t number, const std::function<void(Storage&)>& work,
                             Storage& inner = local_storage());

}  // namespace loadstone::test
