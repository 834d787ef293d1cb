#include "cli/remote.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <memory>

#include "base/text.h"
#include "cli/interrupt.h"
#include "cli/log.h"
#include "loadstone/remote.h"
#include "storage/remote_environment.h"

namespace loadstone::cli {

Storage& reading_storage(const RemoteArgs& args) {
  static const std::unique_ptr<Storage> storage = [&] {
    RemoteOptions options = remote_options_from([](const std::string& variable) {
      const char* const value = std::getenv(variable.c_str());
      return std::string(value == nullptr ? "" : value);
    });
    if (!args.ca_file.empty()) options.ca_file = args.ca_file;
    if (!args.proxy.empty()) options.proxy = args.proxy;
    options.on_retry = [](const RemoteRetry& retry) {
      static_cast<void>(append_to_log(fmt::format(
          "retry: '{}' failed ({}); the next attempt begins in {} s", printable(retry.path, 400),
          printable(retry.reason), std::chrono::duration<double>(retry.wait).count())));
    };
    options.is_stopped = &InterruptibleWork::interrupted;
    return make_remote_storage(std::move(options));
  }();
  return *storage;
}

}  // namespace loadstone::cli
