// Declares values as plain data: the engine's only view of a plan, a conversion or a single tensor.
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
  none,      // the engine does not make it
  in_order,  // directly in host memory, in the order of the file
  windows,   // window by window: quantized, merged, without a source or not in host memory
};

// Writes elements that need no source. Several threads may call it for parts of the same value.
using Fill = void (*)(Dtype dtype, std::span<std::byte> to) noexcept;

inline void fill_zeros(Dtype /*dtype*/, std::span<std::byte> to) noexcept {
  std::memset(to.data(), 0, to.size());
}

// A tensor that the engine makes. Does not own anything: all that it refers to must outlive it.
struct Value {
  std::string_view name{};  // for errors and findings
  const Shape* shape = nullptr;
  Dtype dtype = Dtype::f32;                          // dtype of the result, or before quantizing
  std::span<const Box> boxes{};                      // empty for a constant or a fill
  const Merge* merge = nullptr;                      // null: not a merge
  const std::vector<std::byte>* constant = nullptr;  // bytes of all elements
  Fill fill = fill_zeros;                            // used without boxes and a constant
  const Quantization* quantization = nullptr;        // null if the value is not quantized
  std::span<const std::uint32_t> decided_by{};       // see Recipe
  std::string_view device{};                         // empty for host memory or a file
  bool has_place = false;                            // true if the target is in host memory
  Making making = Making::windows;

  [[nodiscard]] std::uint64_t elements() const noexcept { return shape->numel().value_or(0); }
  // Returns the size in bytes of `count` elements of `dtype`.
  [[nodiscard]] std::uint64_t bytes_of(std::uint64_t count) const noexcept {
    return Encoding(dtype).byte_count(count).value_or(0);
  }
  [[nodiscard]] bool goes_to_device() const noexcept { return !device.empty(); }
  // Returns true if a fill or a constant is written directly to host memory.
  [[nodiscard]] bool is_filled_in_place() const noexcept {
    return boxes.empty() && quantization == nullptr && has_place;
  }
};

// Values of one catalog. Does not own them. Thread-safe while no thread writes to it.
struct ValueSet {
  const Catalog& catalog;
  std::vector<Value> list{};
  std::span<const Decoding> decodings{};  // decodings that boxes copy from
  bool allows_non_finite = false;         // applies to quantized values

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
