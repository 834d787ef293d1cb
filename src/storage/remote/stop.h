// Cancels requests that are in progress or waiting.
#pragma once

#include <functional>
#include <utility>

namespace loadstone {

using IsStopped = std::function<bool()>;

// During its lifetime, requests of this thread also call `is_stopped` to check for cancellation.
class StopScope {
 public:
  explicit StopScope(const IsStopped& is_stopped) noexcept
      : before_(std::exchange(current_, &is_stopped)) {}
  ~StopScope() { current_ = before_; }
  StopScope(const StopScope&) = delete;
  StopScope& operator=(const StopScope&) = delete;

  // Passes on exceptions of the caller's function.
  [[nodiscard]] static bool is_stopped() { return current_ != nullptr && (*current_)(); }

 private:
  static inline constinit thread_local const IsStopped* current_ = nullptr;
  const IsStopped* const before_;
};

}  // namespace loadstone
