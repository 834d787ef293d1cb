// The files that are read from, and whether they still are what the headers said.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/storage.h"

namespace loadstone {

// Throws Error "io.changed" where size, times, inode or device are others than when the catalog was
// made.
void check_identity(const Shard& shard, const FileIdentity& now);

// Reads the configs again if tensors of the catalog depend on them. Throws Error "io.changed" if
// they describe the quantization differently now.
void check_claims(const Catalog& catalog, Storage& storage);

// Shards of a catalog, opened once and shared by all threads. Thread-safe.
class OpenShards {
 public:
  // Opens all of them, or those that hold the `tensors`. Throws Error "io.changed" where one has
  // another identity or header than the catalog says, and what opening throws. The catalog must
  // live as long.
  OpenShards(const Catalog& catalog, Storage* storage);
  OpenShards(const Catalog& catalog, Storage* storage, std::span<const std::uint32_t> tensors);

  // Throws Error "io.changed" where a shard was written to since the catalog was made: what was
  // read of it may be neither the old nor the new.
  void require_unchanged() const;

  // Of the tensor's range in the file.
  void read(const TensorInfo& tensor, std::uint64_t begin, std::span<std::byte> into) const {
    sources_[tensor.shard]->read(tensor.offset_begin + begin, into);
  }
  [[nodiscard]] const Catalog& catalog() const noexcept { return catalog_; }
  // One for each shard of the catalog; null in the place of those that are not needed.
  [[nodiscard]] std::span<const std::shared_ptr<ByteSource>> sources() const noexcept {
    return sources_;
  }

 private:
  void open(std::uint32_t shard, Storage& storage);

  const Catalog& catalog_;
  std::vector<std::shared_ptr<ByteSource>> sources_;
};

}  // namespace loadstone
