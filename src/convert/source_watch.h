// Whether the sources stay as they are while something is made of them.
#pragma once

#include <sys/stat.h>

#include <memory>
#include <optional>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/storage.h"

namespace loadstone {

// Thread-safe.
class SourceWatch {
 public:
  // Sources that are not needed are null.
  SourceWatch(const Catalog& catalog, const std::vector<std::shared_ptr<ByteSource>>& sources);

  // Throws Error "io.changed" where a file's size or time is another, or another file has its name.
  void check() const;

 private:
  const Catalog& catalog_;
  const std::vector<std::shared_ptr<ByteSource>>& sources_;
  std::vector<std::optional<struct stat>> named_;  // nothing: not a file of this machine
};

}  // namespace loadstone
