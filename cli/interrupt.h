// Ctrl-C. A running load or comparison is asked to stop and cleans up; at any other time there is
// nothing to clean up, and the process exits at once with status 130.
#pragma once

namespace loadstone::cli {

// Takes over SIGINT and SIGTERM. With `json`, an immediate end still leaves one document.
void catch_interrupts(bool json) noexcept;

// Call when stdout has received part of the result: a signal must not add another document.
void result_begins() noexcept;

// While one exists, the first signal only makes interrupted() true; a second one ends the process.
// One at a time, on one thread.
class InterruptibleWork {
 public:
  InterruptibleWork() noexcept;
  ~InterruptibleWork();
  InterruptibleWork(const InterruptibleWork&) = delete;
  InterruptibleWork& operator=(const InterruptibleWork&) = delete;

  [[nodiscard]] static bool interrupted() noexcept;
};

}  // namespace loadstone::cli
