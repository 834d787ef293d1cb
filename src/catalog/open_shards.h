// Opens the files to read, and checks that they still match their headers.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/storage.h"

namespace loadstone {

// Throws Error "io.changed" if size, times, inode or device differ from those in the catalog.
void check_identity(const Shard& shard, const FileIdentity& now);

// Reads the configs again if tensors of the catalog depend on them. Throws Error "io.changed" if
// the configs now describe the quantization differently.
void check_claims(const Catalog& catalog, Storage& storage);

// The opened shards of a catalog, shared by all threads. Thread-safe.
class OpenShards {
 public:
  // Opens all shards, or the shards that contain the `tensors`. Throws Error "io.changed" if a
  // shard's identity or header differs from the catalog's, and any error from opening a shard. The
  // catalog must outlive this object.
  OpenShards(const Catalog& catalog, Storage* storage);
  OpenShards(const Catalog& catalog, Storage* storage, std::span<const std::uint32_t> tensors);

  // Throws Error "io.changed" if a shard was written since the catalog was made: bytes read from it
  // may then be old or new.
  void require_unchanged() const;

  // Reads bytes of the tensor, from its byte `begin` on.
  void read(const TensorInfo& tensor, std::uint64_t begin, std::span<std::byte> into) const {
    sources_[tensor.shard]->read(tensor.offset_begin + begin, into);
  }
  [[nodiscard]] const Catalog& catalog() const noexcept { return catalog_; }
  // Returns one source for each shard of the catalog; null for shards that are not needed.
  [[nodiscard]] std::span<const std::shared_ptr<ByteSource>> sources() const noexcept {
    return sources_;
  }

 private:
  void open(std::uint32_t shard, Storage& storage);

  const Catalog& catalog_;
  std::vector<std::shared_ptr<ByteSource>> sources_;
};

}  // namespace loadstone
