#include "cli/log.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <system_error>

#include "base/text.h"
#include "formats/document.h"
#include "loadstone/error.h"
#include "storage/remote_path.h"

namespace loadstone::cli {

namespace {

struct LogFile {
  std::string path;
  bool is_failure_reported = false;
};

LogFile& log_file() {
  static LogFile file;
  return file;
}

// Descriptor of the log, which a signal handler reads too; -1 without a log.
std::atomic<int> log_descriptor{-1};
static_assert(std::atomic<int>::is_always_lock_free);

constexpr std::size_t time_bytes = 21;  // "2026-01-31T23:59:59Z "

void write_digits(char* to, unsigned value, std::size_t digits) noexcept {
  for (std::size_t i = digits; i-- > 0; value /= 10) to[i] = static_cast<char>('0' + value % 10);
}

// Returns the time in UTC. The functions of <ctime> that make such a text are not
// async-signal-safe.
std::array<char, time_bytes> time_now() noexcept {
  using namespace std::chrono;
  const auto now = floor<seconds>(system_clock::now());
  const auto day = floor<days>(now);
  const year_month_day date(day);
  const hh_mm_ss time(now - day);
  std::array<char, time_bytes> text = {};
  std::ranges::copy(std::string_view("0000-00-00T00:00:00Z "), text.begin());
  write_digits(text.data(), static_cast<unsigned>(static_cast<int>(date.year())), 4);
  write_digits(text.data() + 5, static_cast<unsigned>(date.month()), 2);
  write_digits(text.data() + 8, static_cast<unsigned>(date.day()), 2);
  write_digits(text.data() + 11, static_cast<unsigned>(time.hours().count()), 2);
  write_digits(text.data() + 14, static_cast<unsigned>(time.minutes().count()), 2);
  write_digits(text.data() + 17, static_cast<unsigned>(time.seconds().count()), 2);
  return text;
}

// Appends one line in a single system call, so that lines of several processes do not mix.
bool append_line(std::string_view line) noexcept {
  auto time = time_now();
  char end = '\n';
  // writev() does not change the bytes, but its type does not promise this.
  const std::array<iovec, 3> parts = {
      {{time.data(), time.size()}, {const_cast<char*>(line.data()), line.size()}, {&end, 1}}};
  const std::size_t bytes = time.size() + line.size() + 1;
  ssize_t written = 0;
  do {
    written = ::writev(log_descriptor.load(), parts.data(), static_cast<int>(parts.size()));
  } while (written < 0 && errno == EINTR);
  return written == static_cast<ssize_t>(bytes);
}

// Returns a word without the user, the password and the query of a URL in it. Of a second URL,
// nothing is shown.
std::string without_secrets(std::string_view word) {
  constexpr std::string_view mark = "://";
  const std::size_t colon = word.find(mark);
  if (colon == std::string_view::npos) return std::string(word);
  constexpr std::string_view scheme = "https";  // public_url() changes no other URLs
  std::string url = public_url(fmt::format("{}{}", scheme, word.substr(colon)));
  const std::size_t second = url.find(mark, scheme.size() + mark.size());
  if (second != std::string::npos) url = url.substr(0, second) + "...";
  return std::string(word.substr(0, colon)) + url.substr(scheme.size());
}

}  // namespace

std::string shown_arguments(int argc, const char* const* argv) {
  std::string text;
  for (int i = 1; i < argc; ++i) {
    const std::string word = printable(without_secrets(argv[i]), 4000);
    const bool is_plain =
        !word.empty() && word.find_first_of(" \"'*;&|<>()$`\\") == std::string::npos;
    text += (i > 1 ? " " : "") + (is_plain ? word : "'" + word + "'");
  }
  return text;
}

void open_log(const std::string& path) {
  require_document(path);
  log_file().path = path;
  constexpr int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOCTTY;
  log_descriptor.store(::open(path.c_str(), flags, 0666));
  if (has_log()) return;
  const int problem = errno;
  throw Error(problem == EACCES || problem == EROFS ? "io.denied" : "io.open",
              "the system cannot open the log", {.path = path, .system_error = problem});
}

bool has_log() noexcept { return log_descriptor.load() >= 0; }

bool append_to_log(std::string_view text) noexcept {
  if (!has_log()) return true;
  bool is_written = true;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    if (end > 0) is_written = append_line(text.substr(0, end)) && is_written;
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return is_written;
}

void print_error_text(std::string_view text) noexcept {
  [[maybe_unused]] const auto written = std::fwrite(text.data(), 1, text.size(), stderr);
}

void log_text(const std::string& text) {
  if (append_to_log(text) || log_file().is_failure_reported) return;
  const int problem = errno;
  log_file().is_failure_reported = true;
  print_error_text(fmt::format("loadstone: {} cannot write to the log '{}' ({}); lines are lost\n",
                               style_of(stderr).warning("warning:"),
                               printable(log_file().path, 400),
                               std::generic_category().message(problem)));
}

}  // namespace loadstone::cli
