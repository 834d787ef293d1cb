#include "execute/mapped_shard.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "kernels/cast.h"
#include "loadstone/error.h"
#include "storage/file_status.h"

namespace loadstone {

namespace {

[[noreturn]] void fail(const Shard& shard, const char* code, const char* message, int problem) {
  Where where;
  where.path = shard.path;
  where.system_error = problem;
  throw Error(code, message, std::move(where));
}

const char* code_of(int problem) noexcept {
  if (problem == ENOENT || problem == ENOTDIR) return "io.not_found";
  if (problem == EACCES || problem == EPERM) return "io.denied";
  return "io.open";
}

void check_identity(const Shard& shard, const struct stat& status) {
  if (!S_ISREG(status.st_mode)) fail(shard, "io.not_regular", "not a regular file", 0);
  if (identity_of(status) == shard.identity) return;
  fail(shard, "io.changed", "the file is not the one that the plan was made for", 0);
}

}  // namespace

std::shared_ptr<MappedShard> MappedShard::open(const Shard& shard) {
  // O_NONBLOCK: a named pipe would wait for a writer before it can be refused.
  const int descriptor = ::open(shard.path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (descriptor < 0) fail(shard, code_of(errno), "cannot open", errno);
  const std::unique_ptr<const int, void (*)(const int*)> closer(
      &descriptor, [](const int* open_one) { ::close(*open_one); });
  struct stat status = {};
  if (::fstat(descriptor, &status) != 0) fail(shard, "io.open", "cannot tell its size", errno);
  check_identity(shard, status);
  if (status.st_size == 0) return std::shared_ptr<MappedShard>(new MappedShard(nullptr, 0));
  const auto size = static_cast<std::size_t>(status.st_size);
  void* pages =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, descriptor, 0);
  if (pages == MAP_FAILED) fail(shard, "memory.host", "cannot map the file", errno);
  return std::shared_ptr<MappedShard>(new MappedShard(static_cast<std::byte*>(pages), size));
}

MappedShard::~MappedShard() {
  if (data_ != nullptr) ::munmap(data_, static_cast<std::size_t>(size_));
}

std::span<std::byte> MappedShard::bytes(std::uint64_t offset_begin,
                                        std::uint64_t offset_end) const {
  if (offset_begin > offset_end || offset_end > size_) {
    Where where;
    where.byte_offset = offset_begin;
    throw Error("plan.box", "the view leaves its file", std::move(where));
  }
  return {data_ + offset_begin, static_cast<std::size_t>(offset_end - offset_begin)};
}

bool can_view(const TensorInfo& tensor) noexcept {
  if (!tensor.encoding.is_dtype()) return false;
  const std::size_t alignment = element_bytes(tensor.encoding.dtype());
  return tensor.byte_count() == 0 || alignment <= 1 || tensor.offset_begin % alignment == 0;
}

}  // namespace loadstone
