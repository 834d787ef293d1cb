// Handles Ctrl-C. A running load or comparison is asked to stop and then cleans up. At any other
// time there is nothing to clean up, so the process exits at once with status 130.
#pragma once

namespace loadstone::cli {

// Installs handlers for SIGINT and SIGTERM. With `json`, an immediate exit still prints one JSON
// document.
void catch_interrupts(bool json) noexcept;

// Call when part of the result has been printed, so that a signal does not print a second document.
void result_begins() noexcept;

// While an object exists, the first signal only makes interrupted() true; a second signal ends the
// process. At most one object may exist, on one thread.
class InterruptibleWork {
 public:
  InterruptibleWork() noexcept;
  ~InterruptibleWork();
  InterruptibleWork(const InterruptibleWork&) = delete;
  InterruptibleWork& operator=(const InterruptibleWork&) = delete;

  [[nodiscard]] static bool interrupted() noexcept;
};

}  // namespace loadstone::cli
