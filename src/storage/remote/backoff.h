// Computes delays between attempts of a request.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

namespace loadstone {

// The delay doubles with each failure, up to a limit. A random part keeps many clients from
// repeating their requests at the same moment. Not thread-safe.
class Backoff {
 public:
  static constexpr std::chrono::milliseconds wait_max{8000};
  // If a server asks for a longer delay, the request fails instead.
  static constexpr std::uint32_t retry_after_seconds_max = 60;

  Backoff(std::uint32_t first_wait_ms, unsigned attempts_max) noexcept
      : first_wait_ms_(first_wait_ms), attempts_max_(attempts_max) {}

  // Returns the delay after a failed attempt; nullopt if all attempts are used up. `asked_seconds`:
  // the server's Retry-After.
  [[nodiscard]] std::optional<std::chrono::milliseconds> next(
      std::optional<std::uint32_t> asked_seconds);
  // Resets the count of attempts after progress.
  void progressed() noexcept { failures_ = 0; }
  [[nodiscard]] unsigned failures() const noexcept { return failures_; }

 private:
  std::uint32_t first_wait_ms_;
  unsigned attempts_max_;
  unsigned failures_ = 0;
};

}  // namespace loadstone
