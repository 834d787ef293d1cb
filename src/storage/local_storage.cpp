// Implements the reading part of the local file system.
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <utility>

#include "base/only_errors.h"
#include "loadstone/storage.h"
#include "storage/file_status.h"
#include "storage/local_file.h"
#include "storage/local_writer.h"
#include "storage/regular_file.h"

namespace loadstone {

namespace {

// Thread-safe, because it has no state.
class LocalStorage final : public Storage {
 public:
  [[nodiscard]] std::shared_ptr<ByteSource> open(const std::string& path) override {
    return only_errors([&] {
      struct stat status {};
      Descriptor file = open_regular(path, status);
      return local_file(path, std::move(file), status);
    });
  }

  [[nodiscard]] EntryKind kind(const std::string& path) override {
    require_whole_path(path);
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0)
      fail_open(path, errno, "the system cannot inspect the path");
    return status_of(status).kind;
  }

  [[nodiscard]] std::vector<std::string> list(const std::string& folder) override {
    return only_errors([&] {
      require_whole_path(folder);
      std::vector<std::string> names;
      const int problem = local_writer().try_list(folder, names);
      if (problem != 0) fail_open(folder, problem, "the system cannot list the folder");
      std::ranges::sort(names);
      return names;
    });
  }

  [[nodiscard]] std::string resolve(const std::string& path) override {
    return only_errors([&]() -> std::string {
      require_whole_path(path);
      const std::unique_ptr<char, void (*)(void*)> real(::realpath(path.c_str(), nullptr),
                                                        &std::free);
      if (!real) fail_open(path, errno, "the system cannot resolve the path");
      return real.get();
    });
  }

  [[nodiscard]] WritableStorage& writable() override { return local_writer(); }
};

}  // namespace

Storage& local_storage() {
  static LocalStorage storage;
  return storage;
}

}  // namespace loadstone
