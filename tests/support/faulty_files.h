// A file system that fails where it is told to: below the rules that try again and clean up, so
// that these are what is tested.
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

// A call of the system that is about to be made.
struct FileCall {
  std::uint64_t number = 0;  // from 1, of all threads
  std::string_view name;     // "write", "rename" ...
  std::string path;
};

// What becomes of it: an error number instead of the call, a write of only half the bytes, or
// std::bad_alloc.
struct FileFault {
  int problem = 0;
  bool is_short = false;
  bool is_memory = false;
};

// Before another file system, to whose disk nothing is brought; `choose` is called before each of
// its calls, and may end the process. Thread-safe as far as both are.
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

  class Gate;  // where every call passes

 private:
  std::shared_ptr<Gate> gate_;
  std::unique_ptr<WritableStorage> writes_;
};

// Nothing fails.
[[nodiscard]] inline FileFault no_fault(const FileCall&) { return {}; }
// Fails the n-th call, and no other.
[[nodiscard]] FaultyFiles::Choose fail_call(std::uint64_t number, FileFault fault);

// How many descriptors this process has.
[[nodiscard]] std::size_t open_descriptors();

// Runs `work` in a child that is killed (SIGKILL) before its n-th call. False: it came to its end.
[[nodiscard]] bool killed_at(std::uint64_t number, const std::function<void(Storage&)>& work,
                             Storage& inner = local_storage());

}  // namespace loadstone::test
