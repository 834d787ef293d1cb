#include "loadstone/name_hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <chrono>
#include <cstdint>
#include <random>

namespace loadstone {

namespace {

// Returns a random seed. Uses the clock and an address if the system provides no randomness.
std::uint64_t random_seed() noexcept {
  std::uint64_t seed = 0;
  try {
    std::random_device device;
    seed = std::uint64_t{device()} << 32 | device();
  } catch (...) {
    seed = static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()) ^
           reinterpret_cast<std::uintptr_t>(&seed);
  }
  return seed;
}

}  // namespace

std::size_t NameHash::operator()(std::string_view name) const {
  static const std::uint64_t seed = random_seed();
  return XXH3_64bits_withSeed(name.data(), name.size(), seed);
}

}  // namespace loadstone
