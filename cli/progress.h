// Shows the progress of long work and lets the user cancel it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "loadstone/observer.h"
#include "loadstone/page.h"

namespace loadstone::cli {

// Updates a progress line if stderr is a terminal, records the peak memory, and stops the work if
// the user interrupts. Use one object per load or comparison, on one thread.
class WorkWatch : public Observer {
 public:
  WorkWatch();
  ~WorkWatch() override;  // clears the line
  WorkWatch(const WorkWatch&) = delete;
  WorkWatch& operator=(const WorkWatch&) = delete;

  bool on_progress(const Progress& progress) override;
  // Removes the line from the terminal.
  void clear() noexcept;

  [[nodiscard]] std::uint64_t anonymous_bytes_peak() const noexcept {
    return anonymous_bytes_peak_;
  }

  // Returns at most a thousand samples, spread evenly over the work up to now.
  [[nodiscard]] const std::vector<ProgressSample>& samples() const noexcept { return samples_; }

 private:
  void keep(const Progress& progress);
  void show(const Progress& progress);

  bool is_shown_;
  bool shown_ = false;
  double seconds_begin_;
  std::uint64_t anonymous_bytes_peak_ = 0;
  std::vector<ProgressSample> samples_;
  std::size_t seen_ = 0;
  std::size_t stride_ = 1;  // every stride_-th sample is kept
};

// Returns a text such as "12 s", "1:05 min" or "2:30 h".
[[nodiscard]] std::string time_text(double seconds);

// Returns a line of at most `width` columns with the share, bytes, rate and remaining time.
[[nodiscard]] std::string progress_line(const Progress& progress, double seconds,
                                        std::size_t width);

}  // namespace loadstone::cli
