// Elements of a catalog's tensors, and of values that are made of some, as bytes in C order.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "boxes/decodings.h"
#include "catalog/open_shards.h"
#include "engine/value_reader.h"
#include "loadstone/catalog.h"

namespace loadstone {

// Not owning: the catalog must outlive all copies.
[[nodiscard]] inline std::shared_ptr<const Catalog> borrowed(const Catalog& catalog) {
  return {std::shared_ptr<const Catalog>(), &catalog};
}

// All elements of a tensor in C order, as a box of them.
[[nodiscard]] Box whole_box(std::uint32_t source, const TensorInfo& tensor);

// Reads the elements of a tensor, in C order or in file order, or of a value made from tensors.
// `stop`: read() then returns early, and its bytes are undefined. Not thread-safe.
class ElementReader {
 public:
  ElementReader(const OpenShards& shards, const TensorInfo& tensor, bool as_in_file,
                std::atomic<bool>& stop);
  // Reads in this dtype.
  ElementReader(const OpenShards& shards, const std::string& name, TensorRecipe value, Dtype dtype,
                std::atomic<bool>& stop);

  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  // Returns the finite values, read since the last call, that overflow the dtype.
  [[nodiscard]] Overflow take_overflow() { return reader_ ? reader_->take_overflow() : Overflow(); }
  // Reads whole elements.
  void read(std::uint64_t begin, std::span<std::byte> into);

 private:
  void open(const std::string& name, Dtype dtype);

  const OpenShards& shards_;
  std::atomic<bool>& stop_;
  const TensorInfo* tensor_ = nullptr;
  std::uint64_t size_;
  std::uint64_t element_bytes_ = 0;  // 0: as in the file
  TensorRecipe value_;
  std::unique_ptr<ValueReader> reader_;
};

}  // namespace loadstone
