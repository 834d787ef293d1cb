#include "storage/local_file.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <exception>
#include <utility>

#include "loadstone/error.h"
#include "storage/descriptor_pool.h"
#include "storage/file_status.h"
#include "storage/network_file_system.h"
#include "storage/page_cache.h"
#include "storage/read_batch.h"

namespace loadstone {

namespace {

// Thread-safe, because it only reads from its descriptor, by position. The pool opens the
// descriptor when it is needed.
class LocalFile final : public ByteSource {
 public:
  LocalFile(std::string path, int descriptor, const struct stat& status)
      : is_on_network_(loadstone::is_on_network(descriptor)),
        file_(DescriptorPool::instance(), std::move(path), descriptor, identity_of(status)) {}
  LocalFile(const LocalFile&) = delete;
  LocalFile& operator=(const LocalFile&) = delete;

  [[nodiscard]] const std::string& path() const noexcept override { return file_.path(); }

  [[nodiscard]] FileIdentity identity() const override {
    struct stat status {};
    const DescriptorPool::Use use(file_);
    if (::fstat(use.descriptor(), &status) != 0)
      fail("io.read", "the system cannot get the file's size", 0, errno);
    return identity_of(status);
  }

  [[nodiscard]] bool is_on_network() const override { return is_on_network_; }

  [[nodiscard]] std::optional<double> cached_share() const override {
    const std::uint64_t bytes = identity().bytes;
    const DescriptorPool::Use use(file_);
    return cached_share_of(use.descriptor(), bytes);
  }

  std::uint64_t prefetch(std::uint64_t offset, std::uint64_t bytes) noexcept override {
    try {
      const DescriptorPool::Use use(file_);
      return prefetch_missing(use.descriptor(), offset, bytes);
    } catch (const std::exception&) {
      return 0;  // a later read of these bytes reports the error
    }
  }

  void release(std::uint64_t offset, std::uint64_t bytes) noexcept override {
    try {
      const DescriptorPool::Use use(file_);
      ::posix_fadvise(use.descriptor(), static_cast<off_t>(offset), static_cast<off_t>(bytes),
                      POSIX_FADV_DONTNEED);
    } catch (const std::exception&) {
      // The file is gone or no descriptor is left, so its pages stay cached.
    }
  }

  using ByteSource::read;
  void read(std::uint64_t offset, ReadPieces pieces) override {
    ReadPlace place;
    ReadBatch batch;
    // On a network, copying costs little in comparison, and each call may be a request.
    bool moves = !is_on_network_;
    const DescriptorPool::Use use(file_);
    while (true) {
      batch.gather(pieces, place, offset, moves);
      if (batch.bytes() == 0) return;
      if (offset > static_cast<std::uint64_t>(LLONG_MAX)) {
        fail("io.short_read", "the file is shorter than when it was opened", offset, 0);
      }
      const ssize_t got =
          ::preadv(use.descriptor(), batch.parts().data(), static_cast<int>(batch.parts().size()),
                   static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail("io.read", "the system cannot read the file", offset, errno);
      if (batch.moves() && got != static_cast<ssize_t>(batch.bytes())) {
        moves = false;  // reads the same bytes again, without moving them
        continue;
      }
      if (got == 0) fail("io.short_read", "the file is shorter than when it was opened", offset, 0);
      batch.settle();
      offset += static_cast<std::uint64_t>(got);
      place.advance(pieces, static_cast<std::size_t>(got));
    }
  }

 private:
  [[noreturn]] void fail(const char* code, const char* message, std::uint64_t offset,
                         int problem) const {
    throw Error(code, message, {.path = path(), .byte_offset = offset, .system_error = problem});
  }

  bool is_on_network_;
  mutable PooledFile file_;  // last member, because the pool may close the descriptor from then on
};

}  // namespace

std::shared_ptr<ByteSource> local_file(std::string path, Descriptor descriptor,
                                       const struct stat& status) {
  auto file = std::make_shared<LocalFile>(std::move(path), descriptor.get(), status);
  static_cast<void>(descriptor.release());  // the pool owns the descriptor now
  return file;
}

}  // namespace loadstone
