#include "load/mapped_shard.h"

#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "catalog/open_shards.h"
#include "loadstone/error.h"
#include "storage/file_status.h"
#include "storage/regular_file.h"

namespace loadstone {

std::shared_ptr<MappedShard> MappedShard::open(const Shard& shard) {
  struct stat status = {};
  const Descriptor file = open_regular(shard.path, status);
  check_identity(shard, identity_of(status));
  if (status.st_size == 0) return std::shared_ptr<MappedShard>(new MappedShard(nullptr, 0));
  const auto size = static_cast<std::size_t>(status.st_size);
  void* pages =
      ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file.get(), 0);
  if (pages == MAP_FAILED) {
    throw Error("memory.host", "the system cannot map the file into memory",
                {.path = shard.path, .system_error = errno});
  }
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
    throw Error("plan.box", "the view exceeds its file", std::move(where));
  }
  return {data_ + offset_begin, static_cast<std::size_t>(offset_end - offset_begin)};
}

}  // namespace loadstone
