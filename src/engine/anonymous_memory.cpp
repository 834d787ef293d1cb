#include "engine/anonymous_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <limits>
#include <string>

#include "loadstone/error.h"

namespace loadstone {

AnonymousMemory::AnonymousMemory(std::uint64_t byte_count) {
  if (byte_count == 0) return;
  void* pages = MAP_FAILED;
  errno = ENOMEM;
  if (byte_count <= std::numeric_limits<std::size_t>::max() / 2) {
    // NORESERVE: the plan says what will be needed; the system's guess would refuse what fits.
    pages = ::mmap(nullptr, static_cast<std::size_t>(byte_count), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  if (pages == MAP_FAILED) {
    Where where;
    where.system_error = errno;
    throw Error("memory.host",
                "the system has no address space for " + std::to_string(byte_count) + " bytes",
                where);
  }
  data_ = static_cast<std::byte*>(pages);
  size_ = byte_count;
}

AnonymousMemory::~AnonymousMemory() {
  if (data_ != nullptr) ::munmap(data_, static_cast<std::size_t>(size_));
}

}  // namespace loadstone
