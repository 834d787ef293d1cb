#include "cli/interrupt.h"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <string_view>

#include "cli/log.h"

namespace loadstone::cli {

namespace {

// A signal handler may use only lock-free atomics and async-signal-safe functions such as write(2).
std::atomic<bool> work_can_stop{false};
std::atomic<bool> stop_asked{false};
std::atomic<bool> json_wanted{false};
static_assert(std::atomic<bool>::is_always_lock_free);

constexpr std::string_view json_text =
    R"({"error":{"code":"cancelled","message":"interrupted","path":null,"tensor":null,)"
    R"("byte_offset":null,"field":null,"found":null,"expected":null,"system_error":null}})"
    "\n";
constexpr std::string_view plain_text = "\nloadstone: interrupted [cancelled]\n";

extern "C" void on_interrupt(int signal) {
  if (work_can_stop.load() && (!stop_asked.exchange(true) || signal != SIGINT)) return;
  const bool json = json_wanted.load();
  const std::string_view text = json ? json_text : plain_text;
  [[maybe_unused]] const auto written =
      ::write(json ? STDOUT_FILENO : STDERR_FILENO, text.data(), text.size());
  append_to_log(plain_text);
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

void result_begins() noexcept { json_wanted.store(false); }

InterruptibleWork::InterruptibleWork() noexcept { work_can_stop.store(true); }
InterruptibleWork::~InterruptibleWork() { work_can_stop.store(false); }
bool InterruptibleWork::interrupted() noexcept { return stop_asked.load(); }

}  // namespace loadstone::cli
