// Declares BuildInfo: how this library was built, for bug reports and packagers.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "loadstone/export.h"

namespace loadstone {

struct BuildInfo {
  std::string version;
  std::string compiler;    // "GNU 12.2.0"
  std::string build_type;  // "Release"
  // Name and version of each library that loadstone was compiled with. The version is empty if the
  // library does not define one.
  std::vector<std::pair<std::string, std::string>> libraries;
  bool has_remote = false;  // built with libcurl: can read https://, hf:// and s3://
  bool has_sha256 = false;  // built with OpenSSL: can write sha256-tree receipts
};

[[nodiscard]] LOADSTONE_API BuildInfo build_info();

}  // namespace loadstone
