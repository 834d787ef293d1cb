#include "base/digest.h"

#define XXH_INLINE_ALL
#include <fmt/format.h>
#include <xxhash.h>

namespace loadstone {

struct Digest::State {
  XXH3_state_t hash;
};

// XXH3's state needs an alignment of 64 bytes, which the aligned new of C++17 provides.
Digest::Digest() : state_(std::make_unique<State>()) { XXH3_128bits_reset(&state_->hash); }
Digest::~Digest() = default;
Digest::Digest(Digest&&) noexcept = default;
Digest& Digest::operator=(Digest&&) noexcept = default;

void Digest::update(std::span<const std::byte> bytes) noexcept {
  if (!bytes.empty()) XXH3_128bits_update(&state_->hash, bytes.data(), bytes.size());
}

std::string Digest::hex() const {
  const XXH128_hash_t hash = XXH3_128bits_digest(&state_->hash);
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace loadstone
