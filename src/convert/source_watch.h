// Whether the sources stay as they are while something is made of them.
#pragma once

#include <optional>
#include <vector>

#include "catalog/open_shards.h"

namespace loadstone {

// Thread-safe.
class SourceWatch {
 public:
  SourceWatch(const OpenShards& shards, WritableStorage& storage);

  // Throws Error "io.changed" where a file's size or time is another, or another file has its name.
  void check() const;

 private:
  const OpenShards& shards_;
  WritableStorage& storage_;
  std::vector<std::optional<FileStatus>> named_;  // nothing: not a file of this machine
};

}  // namespace loadstone
