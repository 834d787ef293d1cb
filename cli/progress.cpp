#include "cli/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "base/json_writer.h"
#include "base/text.h"
#include "cli/interrupt.h"
#include "cli/log.h"
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

double done_share(const Progress& progress) {
  if (progress.bytes_total == 0) return 1;
  return std::min(
      1.0, static_cast<double>(progress.bytes_done) / static_cast<double>(progress.bytes_total));
}

// Returns the bytes, and the rate if it is known.
std::string figures_text(const Progress& progress, const ProgressRate& rate) {
  std::string text = fmt::format("  {} of {}", human_bytes(progress.bytes_done),
                                 human_bytes(progress.bytes_total));
  if (progress.bytes_checked > 0) {
    text += fmt::format(" ({} finished before)", human_bytes(progress.bytes_checked));
  }
  if (rate.bytes_per_second) text += fmt::format("  {}/s", human_bytes(*rate.bytes_per_second));
  return text;
}

// Returns the remaining time, or an empty text if it is unknown.
std::string left_text(const Progress& progress, const ProgressRate& rate) {
  if (rate.bytes_per_second.value_or(0) == 0) return {};
  const auto left = progress.bytes_total - std::min(progress.bytes_done, progress.bytes_total);
  const double seconds = static_cast<double>(left) / static_cast<double>(*rate.bytes_per_second);
  return "  " + time_text(seconds) + " left";
}

std::string line_text(const Progress& progress, const ProgressRate& rate, bool is_done) {
  return fmt::format("loadstone: {:.0f}%{}{}\n", done_share(progress) * 100,
                     figures_text(progress, rate),
                     is_done ? "  done in " + time_text(rate.seconds) : left_text(progress, rate));
}

std::string line_json(const Progress& progress, const ProgressRate& rate, bool is_done) {
  JsonWriter json;
  json.begin_object();
  json.member("bytes_done", progress.bytes_done);
  json.member("bytes_total", progress.bytes_total);
  json.member("bytes_checked", progress.bytes_checked);
  json.member("seconds", rate.seconds);
  json.member("rate", rate.bytes_per_second);
  json.member("done", is_done);
  json.end_object();
  return json.take() + "\n";
}

}  // namespace

std::string progress_bar(const Progress& progress, const ProgressRate& rate, std::size_t width) {
  const double share = done_share(progress);
  std::string line = fmt::format("{:3.0f}%", share * 100);
  const std::string figures = figures_text(progress, rate) + left_text(progress, rate);
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
    : has_bar_(!is_quiet() && progress_form() == ProgressForm::automatic && is_terminal(stderr)),
      prints_lines_(!is_quiet() && !has_bar_),
      seconds_begin_(now_seconds()),
      seconds_line_(seconds_begin_) {}

WorkWatch::~WorkWatch() { clear(); }

bool WorkWatch::on_progress(const Progress& progress) {
  anonymous_bytes_peak_ = std::max(anonymous_bytes_peak_, process_memory().anonymous_bytes);
  if (InterruptibleWork::interrupted()) return false;
  if (seen_ == 0 || progress.bytes_checked != now_.bytes_checked) {
    first_ = progress;
    seconds_first_ = now_seconds();
  }
  now_ = progress;
  keep(progress);
  if (has_bar_) show_bar();
  if (now_seconds() - seconds_line_ >= progress_seconds()) {
    seconds_line_ = now_seconds();
    report_line(prints_lines_, false);
  }
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

ProgressRate WorkWatch::rate() const {
  const double now = now_seconds();
  ProgressRate rate{.seconds = now - seconds_begin_, .bytes_per_second = {}};
  const double counted = now - seconds_first_;
  // A rate over a shorter time would be random.
  if (seen_ == 0 || counted < 0.2) return rate;
  const auto bytes = now_.bytes_done - std::min(first_.bytes_done, now_.bytes_done);
  rate.bytes_per_second = static_cast<std::uint64_t>(static_cast<double>(bytes) / counted);
  return rate;
}

void WorkWatch::show_bar() {
  // Leave the last column empty, because some terminals wrap the line when it is written.
  const std::size_t width = std::max<std::size_t>(terminal_columns(), 2) - 1;
  print_error_text("\r" + progress_bar(now_, rate(), width) + "\x1b[K");
  std::fflush(stderr);
  is_bar_shown_ = true;
}

void WorkWatch::report_line(bool is_printed, bool is_done) {
  const ProgressRate figures = rate();
  const std::string line = line_text(now_, figures, is_done);
  is_line_printed_ = is_line_printed_ || is_printed;
  if (is_printed) {
    const bool is_json = progress_form() == ProgressForm::json;
    print_error_text(is_json ? line_json(now_, figures, is_done) : line);
  }
  if (has_log()) log_text(line);
}

void WorkWatch::clear() noexcept {
  if (!is_bar_shown_) return;
  print_error_text("\r\x1b[K");
  std::fflush(stderr);
  is_bar_shown_ = false;
}

void WorkWatch::finish() {
  clear();
  // Scripts may expect that a short command without these options prints nothing on stderr.
  const bool is_asked = progress_form() != ProgressForm::automatic || is_line_printed_;
  report_line(prints_lines_ && is_asked, true);
}

}  // namespace loadstone::cli
