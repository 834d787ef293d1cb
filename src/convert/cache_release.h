// Keeps a conversion that is larger than memory from filling the system's page cache.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "boxes/value.h"
#include "catalog/open_shards.h"
#include "loadstone/convert.h"

namespace loadstone {

// Thread-safe.
class CacheRelease {
 public:
  // Looks which sources are in the cache already. All must live as long.
  CacheRelease(const Conversion& conversion, const ValueSet& values, const OpenShards& shards,
               PageCache wanted);

  // Whether pages are released at all.
  [[nodiscard]] bool is_on() const noexcept { return is_on_; }
  // All that the target is made of has been read.
  void made(std::uint32_t target) const;

 private:
  const ValueSet& values_;
  const OpenShards& shards_;
  bool is_on_;
  std::vector<bool> is_released_;  // by shard
};

}  // namespace loadstone
