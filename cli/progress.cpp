#include "cli/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>

#include "base/text.h"
#include "cli/interrupt.h"
#include "cli/voice.h"
#include "loadstone/machine.h"

namespace loadstone::cli {

namespace {

constexpr std::size_t bar_columns_max = 30;
constexpr std::size_t samples_max = 1000;

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::size_t terminal_columns() {
  winsize size = {};
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

}  // namespace

std::string time_text(double seconds) {
  // Times are limited to 99:59 h, because longer times are useless and could overflow an integer.
  const auto whole = static_cast<unsigned>(std::min(std::ceil(seconds), 359'999.0));
  if (whole < 60) return fmt::format("{} s", whole);
  if (whole < 3600) return fmt::format("{}:{:02} min", whole / 60, whole % 60);
  return fmt::format("{}:{:02} h", whole / 3600, whole / 60 % 60);
}

std::string progress_line(const Progress& progress, double seconds, std::size_t width) {
  const double share = progress.bytes_total == 0
                           ? 1.0
                           : std::min(1.0, static_cast<double>(progress.bytes_done) /
                                               static_cast<double>(progress.bytes_total));
  const auto speed =
      seconds > 0.2 ? static_cast<std::uint64_t>(static_cast<double>(progress.bytes_done) / seconds)
                    : 0;
  std::string line = fmt::format("{:3.0f}%", share * 100);
  std::string figures = fmt::format("  {} of {}", human_bytes(progress.bytes_done),
                                    human_bytes(progress.bytes_total));
  if (speed > 0) {
    figures += fmt::format("  {}/s", human_bytes(speed));
    const auto left = progress.bytes_total - std::min(progress.bytes_done, progress.bytes_total);
    figures += "  " + time_text(static_cast<double>(left) / static_cast<double>(speed)) + " left";
  }
  const std::size_t taken = line.size() + figures.size() + 3;  // 3 columns for " [" and "]"
  if (width > taken + 4) {
    const std::size_t columns = std::min(bar_columns_max, width - taken);
    const auto full = static_cast<std::size_t>(share * static_cast<double>(columns));
    line += " [" + std::string(full, '=') + std::string(columns - full, ' ') + "]";
  }
  line += figures;
  if (line.size() > width) line.resize(width);
  return line;
}

WorkWatch::WorkWatch()
    : is_shown_(!is_quiet() && is_terminal(stderr)), seconds_begin_(now_seconds()) {}

WorkWatch::~WorkWatch() { clear(); }

bool WorkWatch::on_progress(const Progress& progress) {
  anonymous_bytes_peak_ = std::max(anonymous_bytes_peak_, process_memory().anonymous_bytes);
  if (InterruptibleWork::interrupted()) return false;
  keep(progress);
  if (is_shown_) show(progress);
  return true;
}

void WorkWatch::keep(const Progress& progress) {
  if (seen_++ % stride_ != 0) return;
  if (samples_.size() == samples_max) {
    for (std::size_t s = 0; s < samples_max / 2; ++s) samples_[s] = samples_[2 * s];
    samples_.resize(samples_max / 2);
    stride_ *= 2;
  }
  samples_.push_back({now_seconds() - seconds_begin_, progress.bytes_done});
}

void WorkWatch::show(const Progress& progress) {
  // Leave the last column empty, because some terminals wrap the line when it is written.
  const std::size_t width = std::max<std::size_t>(terminal_columns(), 2) - 1;
  const std::string line = progress_line(progress, now_seconds() - seconds_begin_, width);
  fmt::print(stderr, "\r{}\x1b[K", line);
  std::fflush(stderr);
  shown_ = true;
}

void WorkWatch::clear() noexcept {
  if (!shown_) return;
  std::fputs("\r\x1b[K", stderr);
  std::fflush(stderr);
  shown_ = false;
}

}  // namespace loadstone::cli
