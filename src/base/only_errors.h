// The promise of the public interface: functions throw Error and nothing else.
#pragma once

#include <exception>
#include <utility>

namespace loadstone {

// Whether this thread is inside of a public function. Others that are called there leave their
// exceptions to the first one: to those who catch an Error of a file in between, memory that ends
// is none.
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

// Holds an exception that a function of the caller's threw. The caller gets it as it is.
struct CallerException {
  std::exception_ptr thrown;
};

// Error "memory.host", made while there was memory to make it of. Thread-safe.
[[nodiscard]] const std::exception_ptr& out_of_memory() noexcept;

// Throws the Error that the exception in hand comes to; to be called in a handler. Inside of a
// public function it is thrown as it is.
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
