// The promise of the public interface: functions throw Error and nothing else.
#pragma once

#include <exception>
#include <utility>

namespace loadstone {

// Marks this thread as inside of a public function. Only the outermost public call converts
// exceptions, so that a handler for an Error in between does not catch memory exhaustion.
class Inside {
 public:
  explicit Inside(bool now) noexcept : before_(std::exchange(current_, now)) {}
  ~Inside() { current_ = before_; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

  [[nodiscard]] static bool current() noexcept { return current_; }

 private:
  static inline constinit thread_local bool current_ = false;
  const bool before_;
};

// Wraps an exception from a function of the caller, who gets it unchanged.
struct CallerException {
  std::exception_ptr thrown;
};

// Error "memory.host", made while there was memory to make it of. Thread-safe.
[[nodiscard]] const std::exception_ptr& out_of_memory() noexcept;

// Converts the current exception to an Error and throws it; call it in a handler. Inside of a
// public function it rethrows the exception unchanged.
[[noreturn]] void throw_as_error();

// Every public function that is not noexcept does its work in here; constructors have a handler.
template <typename Work>
decltype(auto) only_errors(const Work& work) {
  try {
    const Inside inside(true);
    return work();
  } catch (...) {
    throw_as_error();
  }
}

}  // namespace loadstone
