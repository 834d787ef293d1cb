// Computes a fingerprint of bytes with XXH3-128, which detects changes but not forgery.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace loadstone {

// Not thread-safe.
class Digest {
 public:
  Digest();
  ~Digest();
  Digest(Digest&&) noexcept;
  Digest& operator=(Digest&&) noexcept;

  void update(std::span<const std::byte> bytes) noexcept;
  // Returns 32 hex digits for all bytes added.
  [[nodiscard]] std::string hex() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Adds the eight bytes of an integer, least significant first.
template <typename Hash>
void add_number(Hash& hash, std::uint64_t number) {
  std::array<std::byte, 8> bytes;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>(number >> (8 * i) & 0xff);
  }
  hash.update(bytes);
}

}  // namespace loadstone
