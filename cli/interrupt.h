// Handles SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed terminal). A running load or comparison is
// asked to stop and then cleans up. At any other time there is nothing to clean up, so the process
// exits at once with status 130.
#pragma once

#include <string_view>

namespace loadstone::cli {

// Installs handlers for the signals that the parent process does not ignore. With `json`, an
// immediate exit still prints one JSON document.
void catch_interrupts(bool json) noexcept;

// Returns the name of the first signal that asked the process to stop, such as "SIGTERM"; empty
// without one.
[[nodiscard]] std::string_view first_signal() noexcept;

// Call when part of the result has been printed, so that a signal does not print a second document.
void result_begins() noexcept;

// While an object exists, the first signal only makes interrupted() true. After it, SIGINT ends the
// process, but SIGTERM and SIGHUP do nothing, because service managers and closing terminals send
// them several times. At most one object may exist, on one thread.
class InterruptibleWork {
 public:
  InterruptibleWork() noexcept;
  ~InterruptibleWork();
  InterruptibleWork(const InterruptibleWork&) = delete;
  InterruptibleWork& operator=(const InterruptibleWork&) = delete;

  [[nodiscard]] static bool interrupted() noexcept;
};

}  // namespace loadstone::cli
