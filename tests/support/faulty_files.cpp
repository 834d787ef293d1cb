#include "support/faulty_files.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <iterator>
#include <new>
#include <stdexcept>
#include <utility>

#include "loadstone/error.h"

namespace loadstone::test {

class FaultyFiles::Gate {
 public:
  explicit Gate(Choose choose) : choose_(std::move(choose)) {}

  FileFault pass(std::string_view name, const std::string& path) {
    const FileFault fault = choose_({.number = ++calls_, .name = name, .path = path});
    if (fault.is_memory) throw std::bad_alloc();
    return fault;
  }
  // Makes a call that has no byte count, so it cannot be cut short.
  template <typename Call>
  int call(std::string_view name, const std::string& path, const Call& inner) {
    const int problem = pass(name, path).problem;
    return problem != 0 ? problem : inner();
  }
  // Makes a read. Reads repeat interrupted calls internally, so they report no error number.
  void read(std::string_view name, const std::string& path) {
    const FileFault fault = pass(name, path);
    if (fault.problem == 0 || fault.problem == EINTR) return;
    throw Error("io.read", "cannot read", {.path = path, .system_error = fault.problem});
  }
  [[nodiscard]] std::uint64_t calls() const noexcept { return calls_; }

 private:
  Choose choose_;
  std::atomic<std::uint64_t> calls_ = 0;
};

namespace {

using GatePointer = std::shared_ptr<FaultyFiles::Gate>;

class FaultySource final : public ForwardingSource {
 public:
  FaultySource(std::shared_ptr<ByteSource> inner, GatePointer gate)
      : ForwardingSource(std::move(inner)), gate_(std::move(gate)) {}
  [[nodiscard]] FileIdentity identity() const override {
    gate_->read("identity", path());
    return ForwardingSource::identity();
  }
  using ByteSource::read;
  void read(std::uint64_t offset, std::span<const std::span<std::byte>> pieces) override {
    gate_->read("read", path());
    ForwardingSource::read(offset, pieces);
  }

 private:
  GatePointer gate_;
};

class FaultySink final : public FileSink {
 public:
  FaultySink(std::unique_ptr<FileSink> inner, GatePointer gate)
      : inner_(std::move(inner)), gate_(std::move(gate)) {}
  [[nodiscard]] const std::string& path() const noexcept override { return inner_->path(); }
  int try_reserve(std::uint64_t byte_count, Reserve how) override {
    return gate_->call("reserve", path(), [&] { return inner_->try_reserve(byte_count, how); });
  }
  std::int64_t try_write(std::uint64_t offset, std::span<const std::byte> bytes) override {
    const FileFault fault = gate_->pass("write", path());
    if (fault.problem != 0) return -fault.problem;
    if (fault.is_short) bytes = bytes.first((bytes.size() + 1) / 2);
    return inner_->try_write(offset, bytes);
  }
  int try_map(std::uint64_t byte_count, std::byte*& memory) override {
    return gate_->call("map", path(), [&] { return inner_->try_map(byte_count, memory); });
  }
  // Skips the sync, which costs time: even if the process is killed, its writes remain.
  int try_sync() override {
    return gate_->call("sync", path(), [] { return 0; });
  }

 private:
  std::unique_ptr<FileSink> inner_;
  GatePointer gate_;
};

class FaultyLock final : public FileLock {
 public:
  FaultyLock(std::unique_ptr<FileLock> inner, GatePointer gate)
      : inner_(std::move(inner)), gate_(std::move(gate)) {}
  [[nodiscard]] const std::string& path() const noexcept override { return inner_->path(); }
  int try_take(LockMode mode, bool waits) override {
    return gate_->call("lock", path(), [&] { return inner_->try_take(mode, waits); });
  }
  [[nodiscard]] bool is_named() const override { return inner_->is_named(); }

 private:
  std::unique_ptr<FileLock> inner_;
  GatePointer gate_;
};

// Calls whose failure has no consequence (try_resolve, try_free_bytes, try_permit) always succeed.
class FaultyWrites final : public WritableStorage {
 public:
  FaultyWrites(WritableStorage& inner, GatePointer gate) : inner_(inner), gate_(std::move(gate)) {}

  int try_status(const std::string& path, bool follows_link, FileStatus& status) override {
    return gate_->call("status", path,
                       [&] { return inner_.try_status(path, follows_link, status); });
  }
  int try_list(const std::string& folder, std::vector<std::string>& names) override {
    return gate_->call("list", folder, [&] { return inner_.try_list(folder, names); });
  }
  int try_open(const std::string& path, std::shared_ptr<ByteSource>& file) override {
    return gate_->call("open", path, [&] {
      const int problem = inner_.try_open(path, file);
      if (problem == 0) file = std::make_shared<FaultySource>(std::move(file), gate_);
      return problem;
    });
  }
  int try_resolve(const std::string& path, std::string& real) override {
    return inner_.try_resolve(path, real);
  }
  int try_free_bytes(const std::string& folder, std::uint64_t& bytes) override {
    return inner_.try_free_bytes(folder, bytes);
  }
  int try_permit(const std::string& path, std::uint32_t permissions) override {
    return inner_.try_permit(path, permissions);
  }
  int try_create(const std::string& path, std::unique_ptr<FileSink>& file) override {
    return gate_->call("create", path, [&] {
      const int problem = inner_.try_create(path, file);
      if (problem == 0) file = std::make_unique<FaultySink>(std::move(file), gate_);
      return problem;
    });
  }
  int try_make_folder(const std::string& path) override {
    return gate_->call("make_folder", path, [&] { return inner_.try_make_folder(path); });
  }
  int try_rename(const std::string& from, const std::string& to) override {
    return gate_->call("rename", to, [&] { return inner_.try_rename(from, to); });
  }
  int try_exchange(const std::string& a, const std::string& b) override {
    return gate_->call("exchange", b, [&] { return inner_.try_exchange(a, b); });
  }
  int try_link(const std::string& from, const std::string& to) override {
    return gate_->call("link", to, [&] { return inner_.try_link(from, to); });
  }
  int try_remove(const std::string& path) override {
    return gate_->call("remove", path, [&] { return inner_.try_remove(path); });
  }
  int try_remove_folder(const std::string& path) override {
    return gate_->call("remove_folder", path, [&] { return inner_.try_remove_folder(path); });
  }
  int try_sync_folder(const std::string& path) override {
    return gate_->call("sync_folder", path, [] { return 0; });
  }
  int try_open_lock(const std::string& path, std::unique_ptr<FileLock>& lock) override {
    return gate_->call("open_lock", path, [&] {
      const int problem = inner_.try_open_lock(path, lock);
      if (problem == 0) lock = std::make_unique<FaultyLock>(std::move(lock), gate_);
      return problem;
    });
  }

 private:
  WritableStorage& inner_;
  GatePointer gate_;
};

}  // namespace

FaultyFiles::FaultyFiles(Choose choose, Storage& inner)
    : ForwardingStorage(inner),
      gate_(std::make_shared<Gate>(std::move(choose))),
      writes_(std::make_unique<FaultyWrites>(inner.writable(), gate_)) {}

FaultyFiles::~FaultyFiles() = default;

std::shared_ptr<ByteSource> FaultyFiles::open(const std::string& path) {
  gate_->read("open", path);
  return std::make_shared<FaultySource>(ForwardingStorage::open(path), gate_);
}

EntryKind FaultyFiles::kind(const std::string& path) {
  gate_->read("kind", path);
  return ForwardingStorage::kind(path);
}

std::vector<std::string> FaultyFiles::list(const std::string& folder) {
  gate_->read("list", folder);
  return ForwardingStorage::list(folder);
}

std::string FaultyFiles::resolve(const std::string& path) {
  gate_->read("resolve", path);
  return ForwardingStorage::resolve(path);
}

WritableStorage& FaultyFiles::writable() { return *writes_; }

std::uint64_t FaultyFiles::calls() const noexcept { return gate_->calls(); }

FaultyFiles::Choose fail_call(std::uint64_t number, FileFault fault) {
  return
      [number, fault](const FileCall& call) { return call.number == number ? fault : FileFault(); };
}

std::size_t open_descriptors() {
  const std::filesystem::directory_iterator entries("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
}

bool killed_at(std::uint64_t number, const std::function<void(Storage&)>& work, Storage& inner) {
  const pid_t child = ::fork();
  if (child < 0) throw std::runtime_error("cannot fork");
  if (child == 0) {
    FaultyFiles files(
        [number](const FileCall& call) {
          if (call.number == number) ::kill(::getpid(), SIGKILL);
          return FileFault();
        },
        inner);
    try {
      work(files);
    } catch (...) {
      ::_exit(1);
    }
    ::_exit(0);
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFSIGNALED(status)) return true;
  if (WEXITSTATUS(status) != 0) throw std::runtime_error("the child failed");
  return false;
}

}  // namespace loadstone::test
