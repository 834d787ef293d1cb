// How this process reaches other machines.
#pragma once

#include <string>

#include "loadstone/storage.h"

namespace loadstone::cli {

// As typed; what is empty is the environment's.
struct RemoteArgs {
  std::string ca_file;
  std::string proxy;
  bool allow_remote = false;  // for plans from files
};

// One for the whole process, with the options of the first call; lives as long.
[[nodiscard]] Storage& reading_storage(const RemoteArgs& args);

}  // namespace loadstone::cli
