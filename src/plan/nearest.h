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

// Names to choose from, with their shapes. Names come before shapes: equal endings first (a prefix
// is what differs most often), then few edits. Not thread-safe: it keeps count of the work done.
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

// A rule for somebody to copy who has the right tensor under another name: the rename, as JSON,
// that makes `target` of `source`. Where both hold the same numbers in the same order, it holds for
// any numbers: one rule for all layers.
[[nodiscard]] std::string suggested_rule(std::string_view source, std::string_view target);

}  // namespace loadstone
