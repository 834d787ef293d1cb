// Shows the progress of long work, and lets the user cancel it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "loadstone/observer.h"
#include "loadstone/page.h"

namespace loadstone::cli {

struct ProgressRate {
  double seconds = 0;                                  // since the work began
  std::optional<std::uint64_t> bytes_per_second = {};  // unknown for a short time
};

// Shows the progress in the form of --progress, appends it to the log, records the peak memory, and
// stops the work if the user interrupts. Use one object per load or comparison, on one thread.
class WorkWatch : public Observer {
 public:
  WorkWatch();
  ~WorkWatch() override;  // removes the bar
  WorkWatch(const WorkWatch&) = delete;
  WorkWatch& operator=(const WorkWatch&) = delete;

  bool on_progress(const Progress& progress) override;
  // Removes the bar from the terminal.
  void clear() noexcept;
  // Call after success. Removes the bar, or prints the last line.
  void finish();

  [[nodiscard]] std::uint64_t anonymous_bytes_peak() const noexcept {
    return anonymous_bytes_peak_;
  }

  // Returns at most a thousand samples, spread evenly over the work up to now.
  [[nodiscard]] const std::vector<ProgressSample>& samples() const noexcept { return samples_; }

 private:
  void keep(const Progress& progress);
  void show_bar();
  void report_line(bool is_printed, bool is_done);
  [[nodiscard]] ProgressRate rate() const;

  const bool has_bar_;
  const bool prints_lines_;
  bool is_bar_shown_ = false;
  bool is_line_printed_ = false;
  const double seconds_begin_;
  double seconds_line_;  // time of the last line
  // The rate counts from the first call after a resumed conversion has checked its kept shards.
  double seconds_first_ = 0;
  Progress first_;
  Progress now_;
  std::uint64_t anonymous_bytes_peak_ = 0;
  std::vector<ProgressSample> samples_;
  std::size_t seen_ = 0;
  std::size_t stride_ = 1;  // every stride_-th sample is kept
};

// Returns a line of at most `width` columns with the share, bytes, rate and remaining time.
[[nodiscard]] std::string progress_bar(const Progress& progress, const ProgressRate& rate,
                                       std::size_t width);

}  // namespace loadstone::cli
