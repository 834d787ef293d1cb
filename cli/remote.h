// Access of this process to other machines.
#pragma once

#include <string>

#include "loadstone/storage.h"

namespace loadstone::cli {

// Options as typed; empty ones are taken from the environment.
struct RemoteArgs {
  std::string ca_file;
  std::string proxy;
  bool allow_remote = false;  // for plans from files
};

// One for the whole process, with the options of the first call; lives as long.
[[nodiscard]] Storage& reading_storage(const RemoteArgs& args);

}  // namespace loadstone::cli
