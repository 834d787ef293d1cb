#include "cli/interrupt.h"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <string_view>
#include <utility>

#include "cli/log.h"

namespace loadstone::cli {

namespace {

// A signal handler may use only lock-free atomics and async-signal-safe functions such as write(2).
std::atomic<bool> work_can_stop{false};
std::atomic<bool> stop_asked{false};
std::atomic<bool> json_wanted{false};
std::atomic<int> signal_number{0};
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<int>::is_always_lock_free);

constexpr std::string_view json_text =
    R"({"error":{"code":"cancelled","message":"interrupted","path":null,"tensor":null,)"
    R"("byte_offset":null,"field":null,"found":null,"expected":null,"system_error":null}})"
    "\n";
constexpr std::string_view plain_text = "\nloadstone: interrupted [cancelled]\n";

// The last line of a log if the process exits in a signal handler. The name of the signal is the
// last word.
constexpr std::pair<int, std::string_view> last_lines[] = {
    {SIGINT, "loadstone: exit status 130 after SIGINT"},
    {SIGTERM, "loadstone: exit status 130 after SIGTERM"},
    {SIGHUP, "loadstone: exit status 130 after SIGHUP"},
};

std::string_view last_line(int signal) noexcept {
  for (const auto& [number, line] : last_lines) {
    if (number == signal) return line;
  }
  return {};
}

extern "C" void on_interrupt(int signal) {
  int none = 0;
  signal_number.compare_exchange_strong(none, signal);
  if (work_can_stop.load() && (!stop_asked.exchange(true) || signal != SIGINT)) return;
  const bool json = json_wanted.load();
  const std::string_view text = json ? json_text : plain_text;
  [[maybe_unused]] const auto written =
      ::write(json ? STDOUT_FILENO : STDERR_FILENO, text.data(), text.size());
  append_to_log(plain_text);
  append_to_log(last_line(signal));
  ::_exit(130);
}

}  // namespace

void catch_interrupts(bool json) noexcept {
  json_wanted.store(json);
  struct sigaction action = {};
  action.sa_handler = on_interrupt;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction before = {};
    // The parent process ignored the signal on purpose (nohup, or a background job of a shell).
    if (sigaction(signal, nullptr, &before) == 0 && before.sa_handler == SIG_IGN) continue;
    sigaction(signal, &action, nullptr);
  }
}

std::string_view first_signal() noexcept {
  const std::string_view line = last_line(signal_number.load());
  return line.substr(line.rfind(' ') + 1);
}

void result_begins() noexcept { json_wanted.store(false); }

InterruptibleWork::InterruptibleWork() noexcept { work_can_stop.store(true); }
InterruptibleWork::~InterruptibleWork() { work_can_stop.store(false); }
bool InterruptibleWork::interrupted() noexcept { return stop_asked.load(); }

}  // namespace loadstone::cli
