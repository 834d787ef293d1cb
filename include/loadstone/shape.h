// The extents of a tensor, outermost first (torch's order, also for GGUF, which stores them
// reversed).
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "loadstone/export.h"

namespace loadstone {

// A shape of any rank, because a file may contain a tensor of rank 201. Value type.
class LOADSTONE_API Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<std::uint64_t> extents) : extents_(extents) {}
  explicit Shape(std::vector<std::uint64_t> extents) : extents_(std::move(extents)) {}

  [[nodiscard]] std::size_t rank() const noexcept { return extents_.size(); }
  // Precondition: `dim` < rank().
  [[nodiscard]] std::uint64_t operator[](std::size_t dim) const noexcept { return extents_[dim]; }
  [[nodiscard]] const std::vector<std::uint64_t>& extents() const noexcept { return extents_; }
  [[nodiscard]] auto begin() const noexcept { return extents_.begin(); }
  [[nodiscard]] auto end() const noexcept { return extents_.end(); }
  // Returns the number of elements; 1 for rank 0; nullopt if the product does not fit into 64 bits.
  // An overflow yields nullopt even if a later extent is 0; no valid file contains such a shape.
  [[nodiscard]] std::optional<std::uint64_t> numel() const noexcept;
  // Returns "[2, 3]" ...
  [[nodiscard]] std::string text() const;

  friend bool operator==(const Shape&, const Shape&) = default;

 private:
  std::vector<std::uint64_t> extents_;
};

// A part of a tensor along its dimensions, such as a rank's shard. Value type.
struct LOADSTONE_API Slice {
  std::vector<std::uint64_t> begin{};  // index of the slice's first element, per dimension
  Shape shape{};
  // Number of equal groups per dimension. The slice takes the same part of each group, and `begin`
  // counts within the first group: for example a rank's part of fused gate and up projections.
  // Empty: one group per dimension.
  std::vector<std::uint64_t> groups = {};

  // Returns true if the slice fits in a tensor of this shape.
  [[nodiscard]] bool is_inside(const Shape& whole) const noexcept;
  // Returns "[0:512, 0:384]" or "[0:512 of 2 groups]".
  [[nodiscard]] std::string text() const;
  [[nodiscard]] std::uint64_t groups_of(std::size_t dim) const noexcept {
    return groups.empty() ? 1 : groups[dim];
  }

  friend bool operator==(const Slice&, const Slice&) = default;
};

}  // namespace loadstone
