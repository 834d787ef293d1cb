// Reads elements of tensors, and of values made from tensors, as bytes in C order.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "boxes/decodings.h"
#include "catalog/open_shards.h"
#include "engine/jobs.h"
#include "engine/value_reader.h"
#include "loadstone/catalog.h"

namespace loadstone {

inline constexpr std::size_t chunk_bytes_max = std::size_t{4} << 20;
inline constexpr std::size_t strided_chunk_bytes_max = std::size_t{64} << 20;

// Returns a pointer that does not own the catalog, which must outlive all copies.
[[nodiscard]] inline std::shared_ptr<const Catalog> borrowed(const Catalog& catalog) {
  return {std::shared_ptr<const Catalog>(), &catalog};
}

// Returns the number of bytes of a value to read at once. If elements are not in file order, each
// chunk reads the whole tensor again, so chunks are larger.
[[nodiscard]] std::size_t bytes_at_once(const TensorRecipe& value);

// Returns a box of all elements of a tensor in C order.
[[nodiscard]] Box whole_box(std::uint32_t source, const TensorInfo& tensor);

// Reads the elements of a tensor, in C order or in file order, or of a value made from tensors. If
// `stop` becomes true, read() returns early, and its bytes are undefined. Not thread-safe.
class ElementReader {
 public:
  ElementReader(const OpenShards& shards, const TensorInfo& tensor, bool as_in_file,
                std::atomic<bool>& stop);
  // Reads values as `dtype`.
  ElementReader(const OpenShards& shards, const std::string& name, TensorRecipe value, Dtype dtype,
                std::atomic<bool>& stop);

  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  // Returns the finite values that overflowed the dtype since the last call.
  [[nodiscard]] Overflow take_overflow() { return reader_ ? reader_->take_overflow() : Overflow(); }
  // Reads whole elements: `begin` and the size are multiples of the element's bytes.
  void read(std::uint64_t begin, std::span<std::byte> into);

 private:
  void open(const std::string& name, Dtype dtype);

  const OpenShards& shards_;
  std::atomic<bool>& stop_;
  const TensorInfo* tensor_ = nullptr;
  std::uint64_t size_;
  std::uint64_t element_bytes_ = 0;  // chooses the order of bytes; 0: as in the file
  TensorRecipe value_;
  std::unique_ptr<ValueReader> reader_;
};

// Reads two values in steps of this many bytes. Returns the first byte at which they differ
// according to `compare`.
template <typename Compare>
std::optional<std::uint64_t> compare_in_steps(ElementReader& first, ElementReader& second,
                                              std::size_t step, Jobs& jobs,
                                              std::vector<std::byte>& scratch, Compare compare) {
  for (std::uint64_t at = 0; at < first.size(); at += step) {
    const std::uint64_t bytes = std::min<std::uint64_t>(step, first.size() - at);
    scratch.resize(2 * bytes);
    const auto left = std::span(scratch).first(bytes);
    const auto right = std::span(scratch).subspan(bytes);
    first.read(at, left);
    second.read(at, right);
    if (!jobs.goes_on(2 * bytes)) break;
    if (const auto found = compare(left, right)) return at + *found;
  }
  return std::nullopt;
}

}  // namespace loadstone
