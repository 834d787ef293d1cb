// A fingerprint of bytes: XXH3-128. It notices change; it is no protection against forgery.
#pragma once

#include <cstddef>
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
  // 32 hex digits of all bytes so far.
  [[nodiscard]] std::string hex() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace loadstone
