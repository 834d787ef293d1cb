#include "storage/remote/backoff.h"

#include <algorithm>
#include <random>

namespace loadstone {

std::optional<std::chrono::milliseconds> Backoff::next(std::optional<std::uint32_t> asked_seconds) {
  if (++failures_ >= attempts_max_) return std::nullopt;
  if (asked_seconds) {
    if (*asked_seconds > retry_after_seconds_max) return std::nullopt;
    return std::chrono::seconds(*asked_seconds);
  }
  const unsigned doublings = std::min(failures_ - 1, 16u);
  const auto most = std::min<std::uint64_t>(std::uint64_t{first_wait_ms_} << doublings,
                                            static_cast<std::uint64_t>(wait_max.count()));
  thread_local std::minstd_rand random(std::random_device{}());
  std::uniform_int_distribution<std::uint64_t> part(most / 2, most);
  return std::chrono::milliseconds(part(random));
}

}  // namespace loadstone
