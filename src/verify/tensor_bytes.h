// The bytes of a catalog's tensors, wherever they stand.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "execute/value_reader.h"
#include "loadstone/catalog.h"
#include "loadstone/storage.h"

namespace loadstone {

// All elements of a tensor in C order, as a box of them.
[[nodiscard]] Box whole_box(std::uint32_t source, const TensorInfo& tensor);

// The shards of a catalog, opened once and shared by all threads. Thread-safe.
class OpenShards {
 public:
  // Throws Error "io.changed", "io.*". The catalog must live as long.
  OpenShards(const Catalog& catalog, Storage* storage);

  // Throws Error "io.changed" where a shard was written to since the catalog was made: what was
  // read of it may be neither the old nor the new.
  void require_unchanged() const;

  // Of the tensor's range in the file.
  void read(const TensorInfo& tensor, std::uint64_t begin, std::span<std::byte> into) const {
    sources_[tensor.shard]->read(tensor.offset_begin + begin, into);
  }
  [[nodiscard]] const Catalog& catalog() const noexcept { return catalog_; }
  [[nodiscard]] std::span<const std::shared_ptr<ByteSource>> sources() const noexcept {
    return sources_;
  }

 private:
  const Catalog& catalog_;
  std::vector<std::shared_ptr<ByteSource>> sources_;
};

// One tensor's elements in C order, or as they stand in the file. Not thread-safe.
class TensorBytes {
 public:
  TensorBytes(const OpenShards& shards, const TensorInfo& tensor, bool as_in_file);

  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  // Whole elements.
  void read(std::uint64_t begin, std::span<std::byte> into);

 private:
  const OpenShards& shards_;
  const TensorInfo& tensor_;
  std::uint64_t size_;
  std::uint64_t element_bytes_ = 0;  // 0: as in the file
  std::atomic<bool> stop_ = false;
  std::vector<Box> boxes_;
  std::unique_ptr<ValueReader> reader_;
};

}  // namespace loadstone
