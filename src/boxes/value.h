// Values as plain data: the engine's only view of a plan, a conversion or one tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/merge.h"
#include "loadstone/quantization.h"
#include "loadstone/recipe.h"
#include "loadstone/shape.h"

namespace loadstone {

// The method by which the engine makes a value.
enum class Making : std::uint8_t {
  none,      // not at all
  in_order,  // in place in host memory, in file order
  windows,   // window by window: quantized, merged, without a source or without such a place
};

// Writes elements that need no source. Several threads call it for parts of one value.
using Fill = void (*)(Dtype dtype, std::span<std::byte> to) noexcept;

inline void fill_zeros(Dtype /*dtype*/, std::span<std::byte> to) noexcept {
  std::memset(to.data(), 0, to.size());
}

// A tensor to make. A view: everything it refers to must outlive it.
struct Value {
  std::string_view name{};  // for errors and findings
  const Shape* shape = nullptr;
  Dtype dtype = Dtype::f32;                          // the final one, or before quantizing
  std::span<const Box> boxes{};                      // empty: the constant, or a fill
  const Merge* merge = nullptr;                      // null: the boxes are all there is
  const std::vector<std::byte>* constant = nullptr;  // the bytes of all elements
  Fill fill = fill_zeros;                            // without boxes and a constant
  const Quantization* quantization = nullptr;        // null: the elements are delivered
  std::span<const std::uint32_t> decided_by{};       // see Recipe
  std::string_view device{};                         // empty: memory of the host, or a file
  bool has_place = false;                            // in host memory
  Making making = Making::windows;

  [[nodiscard]] std::uint64_t elements() const noexcept { return shape->numel().value_or(0); }
  // Bytes of elements of its dtype, from the first one on.
  [[nodiscard]] std::uint64_t bytes_of(std::uint64_t count) const noexcept {
    return Encoding(dtype).byte_count(count).value_or(0);
  }
  [[nodiscard]] bool goes_to_device() const noexcept { return !device.empty(); }
  // Returns true if it is written in place, without reading: a fill or a constant in host memory.
  [[nodiscard]] bool is_filled_in_place() const noexcept {
    return boxes.empty() && quantization == nullptr && has_place;
  }
};

// Values of one catalog. A non-owning view, like its elements. Thread-safe while nobody writes to
// it.
struct ValueSet {
  const Catalog& catalog;
  std::vector<Value> list{};
  std::span<const Decoding> decodings{};  // that boxes copy from
  bool allows_non_finite = false;         // in quantized values

  [[nodiscard]] const Value& operator[](std::size_t index) const noexcept { return list[index]; }
  [[nodiscard]] std::size_t size() const noexcept { return list.size(); }
  [[nodiscard]] const std::vector<TensorInfo>& tensors() const noexcept {
    return catalog.tensors();
  }
  [[nodiscard]] const Shard& shard_of(std::uint32_t tensor) const noexcept {
    return catalog.shards()[tensors()[tensor].shard];
  }
};

}  // namespace loadstone
