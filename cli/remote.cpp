#include "cli/remote.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>

#include "base/json_writer.h"
#include "base/text.h"
#include "cli/interrupt.h"
#include "cli/log.h"
#include "cli/voice.h"
#include "loadstone/remote.h"
#include "storage/remote_environment.h"

namespace loadstone::cli {

namespace {

std::string retry_json(const RemoteRetry& retry, double seconds, std::uint64_t count) {
  JsonWriter json;
  json.begin_object();
  json.key("retry");
  json.begin_object();
  json.member("path", retry.path);
  json.member("reason", retry.reason);
  json.member("wait_seconds", seconds);
  json.member("retries", count);
  json.end_object();
  json.end_object();
  return json.take() + "\n";
}

// Appends a retry to the log. Prints the first retry, and then at most one per interval of
// --progress-interval. Thread-safe.
void tell_retry(const RemoteRetry& retry) {
  static std::mutex mutex;
  static std::uint64_t count = 0;
  static std::optional<std::chrono::steady_clock::time_point> printed;
  const double seconds = std::chrono::duration<double>(retry.wait).count();
  const std::string text =
      fmt::format("retry: '{}' failed ({}); the next attempt begins in {} s",
                  printable(retry.path, 400), printable(retry.reason), seconds);
  static_cast<void>(append_to_log(text));
  if (is_quiet()) return;
  const auto now = std::chrono::steady_clock::now();
  const std::lock_guard lock(mutex);
  ++count;
  if (printed && std::chrono::duration<double>(now - *printed).count() < progress_seconds()) return;
  printed = now;
  if (progress_form() == ProgressForm::json) {
    return print_error_text(retry_json(retry, seconds, count));
  }
  const bool may_have_bar = progress_form() == ProgressForm::automatic && is_terminal(stderr);
  print_error_text(fmt::format("{}loadstone: {}{}\n", may_have_bar ? "\r\x1b[K" : "", text,
                               count > 1 ? fmt::format(" ({} retries)", count) : ""));
}

}  // namespace

Storage& reading_storage(const RemoteArgs& args) {
  static const std::unique_ptr<Storage> storage = [&] {
    RemoteOptions options = remote_options_from([](const std::string& variable) {
      const char* const value = std::getenv(variable.c_str());
      return std::string(value == nullptr ? "" : value);
    });
    if (!args.ca_file.empty()) options.ca_file = args.ca_file;
    if (!args.proxy.empty()) options.proxy = args.proxy;
    options.on_retry = &tell_retry;
    options.is_stopped = &InterruptibleWork::interrupted;
    return make_remote_storage(std::move(options));
  }();
  return *storage;
}

}  // namespace loadstone::cli
