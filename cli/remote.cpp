#include "cli/remote.h"

#include <cstdlib>
#include <memory>

#include "cli/interrupt.h"
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
    options.is_stopped = &InterruptibleWork::interrupted;
    return make_remote_storage(std::move(options));
  }();
  return *storage;
}

}  // namespace loadstone::cli
