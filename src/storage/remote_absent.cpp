// Replaces src/storage/remote/ in builds without libcurl.
#include "loadstone/error.h"
#include "loadstone/remote.h"
#include "storage/forwarding.h"

namespace loadstone {

namespace {

void require_readable(const std::string& path) {
  if (!is_remote(path)) return;
  throw Error("io.remote",
              "this loadstone was built without libcurl, so it cannot read files on other machines",
              {.path = path, .expected = "a path on this machine"});
}

class LocalOnly final : public ForwardingStorage {
 public:
  LocalOnly() : ForwardingStorage(local_storage()) {}

  [[nodiscard]] std::shared_ptr<ByteSource> open(const std::string& path) override {
    require_readable(path);
    return ForwardingStorage::open(path);
  }
  [[nodiscard]] EntryKind kind(const std::string& path) override {
    require_readable(path);
    return ForwardingStorage::kind(path);
  }
  [[nodiscard]] std::vector<std::string> list(const std::string& folder) override {
    require_readable(folder);
    return ForwardingStorage::list(folder);
  }
  [[nodiscard]] std::string resolve(const std::string& path) override {
    require_readable(path);
    return ForwardingStorage::resolve(path);
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open_anew(const std::string& path) override {
    return open(path);
  }
};

}  // namespace

// The signatures must match the real functions, which store their arguments.
// NOLINTBEGIN(performance-unnecessary-value-param)
std::unique_ptr<Storage> make_remote_storage(RemoteOptions /*options*/) {
  return std::make_unique<LocalOnly>();
}

std::unique_ptr<Storage> make_stoppable(Storage& /*storage*/,
                                        std::function<bool()> /*is_stopped*/) {
  return std::make_unique<LocalOnly>();
}
// NOLINTEND(performance-unnecessary-value-param)

bool can_read_remote() noexcept { return false; }

}  // namespace loadstone
