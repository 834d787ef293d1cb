// Cancels requests that are in progress or waiting.
#pragma once

#include <functional>
#include <utility>

namespace loadstone {

using IsStopped = std::function<bool()>;

// During its lifetime, requests of this thread also call `is_stopped` to check for cancellation, in
// addition to those of the enclosing scopes.
class StopScope {
 public:
  explicit StopScope(const IsStopped& is_stopped) noexcept
      : is_stopped_(is_stopped), outer_(std::exchange(current_, this)) {}
  ~StopScope() { current_ = outer_; }
  StopScope(const StopScope&) = delete;
  StopScope& operator=(const StopScope&) = delete;

  // Passes on exceptions of the caller's function.
  [[nodiscard]] static bool is_stopped() {
    for (const StopScope* scope = current_; scope != nullptr; scope = scope->outer_) {
      if (scope->is_stopped_()) return true;
    }
    return false;
  }

 private:
  static inline constinit thread_local const StopScope* current_ = nullptr;
  const IsStopped& is_stopped_;
  const StopScope* const outer_;
};

}  // namespace loadstone
