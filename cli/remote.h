// Configures this process's access to remote files.
#pragma once

#include <string>

#include "loadstone/storage.h"

namespace loadstone::cli {

// Options for remote access, as typed. Empty options are taken from the environment.
struct RemoteArgs {
  std::string ca_file;
  std::string proxy;
  bool allow_remote = false;  // allow plans from files to read remote checkpoints
};

// Returns the storage of the process. The first call creates it with these options; later calls
// ignore theirs. It lives until the process ends.
[[nodiscard]] Storage& reading_storage(const RemoteArgs& args);

}  // namespace loadstone::cli
