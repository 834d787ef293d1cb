#include "engine/pages.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <limits>
#include <string>

#include "engine/limits.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

// Below this size, the system call costs more than it saves.
constexpr std::uint64_t bytes_min = 64 << 10;

#ifdef MADV_POPULATE_WRITE
constexpr int populate_write = MADV_POPULATE_WRITE;
#else
constexpr int populate_write = 23;  // since Linux 5.14; older kernels return an error
#endif

// More nodes than any kernel supports. The system call fails if the mask is too short.
constexpr unsigned long nodes_max = 4096;
constexpr unsigned long word_bits = sizeof(unsigned long) * CHAR_BIT;

}  // namespace

AnonymousMemory::AnonymousMemory(std::uint64_t byte_count) {
  if (byte_count == 0) return;
  void* pages = MAP_FAILED;
  errno = ENOMEM;
  if (byte_count <= std::numeric_limits<std::size_t>::max() / 2) {
    // MAP_NORESERVE, because the kernel's overcommit estimate would reject loads that fit the plan.
    pages = ::mmap(nullptr, static_cast<std::size_t>(byte_count), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  if (pages == MAP_FAILED) {
    Where where;
    where.system_error = errno;
    throw Error(
        "memory.host",
        "the system cannot reserve address space for " + std::to_string(byte_count) + " bytes",
        where);
  }
  data_ = static_cast<std::byte*>(pages);
  size_ = byte_count;
}

AnonymousMemory::~AnonymousMemory() {
  if (data_ != nullptr) ::munmap(data_, static_cast<std::size_t>(size_));
}

void populate(std::byte* data, std::uint64_t bytes) noexcept {
  if (bytes < bytes_min) return;
  // If the system's pages are larger, the call fails without an effect.
  const std::uintptr_t skipped = reinterpret_cast<std::uintptr_t>(data) % page_bytes;
  ::madvise(data - skipped, static_cast<std::size_t>(bytes + skipped), populate_write);
}

bool interleave_new_pages() noexcept {
  std::array<unsigned long, nodes_max / word_bits> nodes{};
  // The nodes of the caller's policy (`numactl --membind`), or all nodes that the process may use.
  int mode = MPOL_DEFAULT;
  if (::syscall(SYS_get_mempolicy, &mode, nodes.data(), nodes_max, nullptr, 0) != 0) return false;
  const bool has_chosen = mode == MPOL_BIND || mode == MPOL_INTERLEAVE;
  if (!has_chosen && ::syscall(SYS_get_mempolicy, nullptr, nodes.data(), nodes_max, nullptr,
                               MPOL_F_MEMS_ALLOWED) != 0) {
    return false;
  }
  return ::syscall(SYS_set_mempolicy, MPOL_INTERLEAVE, nodes.data(), nodes_max) == 0;
}

}  // namespace loadstone
