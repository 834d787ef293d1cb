#include "engine/interleave.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <climits>

namespace loadstone {

namespace {

// More than any kernel is built for: a mask that is too short is refused.
constexpr unsigned long nodes_max = 4096;
constexpr unsigned long word_bits = sizeof(unsigned long) * CHAR_BIT;

}  // namespace

bool interleave_new_pages() noexcept {
  std::array<unsigned long, nodes_max / word_bits> nodes{};
  // Those that the caller's policy has chosen (`numactl --membind`), else all that it may have.
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
