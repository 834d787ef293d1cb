// The build of this library, for bug reports and packagers.
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
  // Name and version of each library that it was compiled with; the version is empty if that
  // library does not define one.
  std::vector<std::pair<std::string, std::string>> libraries;
  bool has_remote = false;  // https://, hf:// and s3://, by libcurl
  bool has_sha256 = false;  // receipts by sha256-tree, by OpenSSL
};

[[nodiscard]] LOADSTONE_API BuildInfo build_info();

}  // namespace loadstone
