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
  // For calls that only succeed or fail: a short one is none of these.
  int problem(std::string_view name, const std::string& path) { return pass(name, path).problem; }
  // For reading, whose interface has no error numbers: interrupted calls never leave it.
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

class FaultySource final : public ByteSource {
 public:
  FaultySource(std::shared_ptr<ByteSource> inner, GatePointer gate)
      : inner_(std::move(inner)), gate_(std::move(gate)) {}
  [[nodiscard]] const std::string& path() const noexcept override { return inner_->path(); }
  [[nodiscard]] FileIdentity identity() const override {
    gate_->read("identity", path());
    return inner_->identity();
  }
  using ByteSource::read;
  void read(std::uint64_t offset, std::span<const std::span<std::byte>> pieces) override {
    gate_->read("read", path());
    inner_->read(offset, pieces);
  }

 private:
  std::shared_ptr<ByteSource> inner_;
  GatePointer gate_;
};

class FaultySink final : public FileSink {
 public:
  FaultySink(std::unique_ptr<FileSink> inner, GatePointer gate)
      : inner_(std::move(inner)), gate_(std::move(gate)) {}
  [[nodiscard]] const std::string& path() const noexcept override { return inner_->path(); }
  int try_reserve(std::uint64_t byte_count, Reserve how) override {
    const int problem = gate_->problem("reserve", path());
    return problem != 0 ? problem : inner_->try_reserve(byte_count, how);
  }
  std::int64_t try_write(std::uint64_t offset, std::span<const std::byte> bytes) override {
    const FileFault fault = gate_->pass("write", path());
    if (fault.problem != 0) return -fault.problem;
    if (fault.is_short) bytes = bytes.first((bytes.size() + 1) / 2);
    return inner_->try_write(offset, bytes);
  }
  int try_map(std::uint64_t byte_count, std::byte*& memory) override {
    const int problem = gate_->problem("map", path());
    return problem != 0 ? problem : inner_->try_map(byte_count, memory);
  }
  int try_sync() override {
    // Writes of a killed process are there without a sync, which would only take time.
    return gate_->problem("sync", path());
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
    const int problem = gate_->problem("lock", path());
    return problem != 0 ? problem : inner_->try_take(mode, waits);
  }
  [[nodiscard]] bool is_named() const override { return inner_->is_named(); }

 private:
  std::unique_ptr<FileLock> inner_;
  GatePointer gate_;
};

class FaultyWrites final : public WritableStorage {
 public:
  FaultyWrites(WritableStorage& inner, GatePointer gate) : inner_(inner), gate_(std::move(gate)) {}

  int try_create(const std::string& path, std::unique_ptr<FileSink>& file) override {
    if (const int problem = gate_->problem("create", path)) return problem;
    std::unique_ptr<FileSink> made;
    if (const int problem = inner_.try_create(path, made)) return problem;
    file = std::make_unique<FaultySink>(std::move(made), gate_);
    return 0;
  }
  int try_make_folder(const std::string& path) override {
    const int problem = gate_->problem("make_folder", path);
    return problem != 0 ? problem : inner_.try_make_folder(path);
  }
  int try_rename(const std::string& from, const std::string& to) override {
    const int problem = gate_->problem("rename", to);
    return problem != 0 ? problem : inner_.try_rename(from, to);
  }
  int try_exchange(const std::string& a, const std::string& b) override {
    const int problem = gate_->problem("exchange", b);
    return problem != 0 ? problem : inner_.try_exchange(a, b);
  }
  int try_link(const std::string& from, const std::string& to) override {
    const int problem = gate_->problem("link", to);
    return problem != 0 ? problem : inner_.try_link(from, to);
  }
  int try_remove(const std::string& path) override {
    const int problem = gate_->problem("remove", path);
    return problem != 0 ? problem : inner_.try_remove(path);
  }
  int try_remove_folder(const std::string& path) override {
    const int problem = gate_->problem("remove_folder", path);
    return problem != 0 ? problem : inner_.try_remove_folder(path);
  }
  int try_sync_folder(const std::string& path) override {
    return gate_->problem("sync_folder", path);
  }
  int try_open_lock(const std::string& path, std::unique_ptr<FileLock>& lock) override {
    if (const int problem = gate_->problem("open_lock", path)) return problem;
    std::unique_ptr<FileLock> made;
    if (const int problem = inner_.try_open_lock(path, made)) return problem;
    lock = std::make_unique<FaultyLock>(std::move(made), gate_);
    return 0;
  }

 private:
  WritableStorage& inner_;
  GatePointer gate_;
};

}  // namespace

FaultyFiles::FaultyFiles(Choose choose, Storage& inner)
    : gate_(std::make_shared<Gate>(std::move(choose))),
      inner_(inner),
      writes_(std::make_unique<FaultyWrites>(inner.writable(), gate_)) {}

FaultyFiles::~FaultyFiles() = default;

std::shared_ptr<ByteSource> FaultyFiles::open(const std::string& path) {
  gate_->read("open", path);
  return std::make_shared<FaultySource>(inner_.open(path), gate_);
}

EntryKind FaultyFiles::kind(const std::string& path) {
  gate_->read("kind", path);
  return inner_.kind(path);
}

std::vector<std::string> FaultyFiles::list(const std::string& folder) {
  gate_->read("list", folder);
  return inner_.list(folder);
}

std::string FaultyFiles::resolve(const std::string& path) {
  gate_->read("resolve", path);
  return inner_.resolve(path);
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
