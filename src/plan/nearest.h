// The names that somebody may have meant, and rules that map them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "loadstone/name_hash.h"
#include "loadstone/shape.h"

namespace loadstone {

// Candidate names with their shapes. Ranks names before shapes: equal suffixes first (a prefix is
// the most frequent difference), then few edits. Not thread-safe: it counts its work.
class NearestNames {
 public:
  // Both must outlive this. A missing shape is null.
  void add(std::string_view name, const Shape* shape);
  [[nodiscard]] std::size_t size() const noexcept { return names_.size(); }

  // Indices in the order of add(), best first, at most `count_max`; those of the same shape first.
  [[nodiscard]] std::vector<std::size_t> nearest(std::string_view name, const Shape& shape,
                                                 std::size_t count_max);

 private:
  struct Entry {
    std::string_view name;
    const Shape* shape;
  };

  void collect_by_ending(std::string_view name, std::vector<std::size_t>& found) const;
  void collect_by_edits(std::string_view name, const Shape& shape, std::vector<std::size_t>& found);

  std::vector<Entry> names_;
  // Endings at a dot (and whole names), each with the first few names that have them.
  NameMap<std::vector<std::uint32_t>> endings_;
  std::unordered_map<std::uint64_t, std::vector<std::uint32_t>> shapes_;
  std::uint64_t comparisons_ = 0;
};

// Suggests a rename, as a JSON rule, that makes `target` from `source`. If both contain the same
// numbers in the same order, it applies to all numbers: one rule for all layers.
[[nodiscard]] std::string suggested_rule(std::string_view source, std::string_view target);

}  // namespace loadstone
