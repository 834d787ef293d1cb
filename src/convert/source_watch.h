// Whether the sources stay as they are while something is made of them.
#pragma once

#include <sys/stat.h>

#include <optional>
#include <vector>

#include "catalog/open_shards.h"

namespace loadstone {

// Thread-safe.
class SourceWatch {
 public:
  explicit SourceWatch(const OpenShards& shards);

  // Throws Error "io.changed" where a file's size or time is another, or another file has its name.
  void check() const;

 private:
  const OpenShards& shards_;
  std::vector<std::optional<struct stat>> named_;  // nothing: not a file of this machine
};

}  // namespace loadstone
