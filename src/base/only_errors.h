// Makes public functions throw Error and no other exception.
#pragma once

#include <exception>
#include <utility>

namespace loadstone {

// Marks this thread as being inside a public function. Only the outermost public call converts
// exceptions, so that an inner handler for Error does not catch memory exhaustion.
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

// Wraps an exception that a callback of the caller threw, so that the caller gets it unchanged.
struct CallerException {
  std::exception_ptr thrown;
};

// Returns Error "memory.host", which was created while memory was available. Thread-safe.
[[nodiscard]] const std::exception_ptr& out_of_memory() noexcept;

// Converts the current exception to an Error and throws it. Call it in a handler. Inside a public
// function, it rethrows the exception unchanged.
[[noreturn]] void throw_as_error();

// Runs the body of a public function. Every public function that is not noexcept uses this;
// constructors have a handler instead.
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
