// Finds candidates for a misspelled name, and suggests rules that map one name to another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "loadstone/name_hash.h"
#include "loadstone/shape.h"

namespace loadstone {

struct Nearest {
  std::vector<std::size_t> indices;  // in the order of add(), best candidate first
  // The first candidate may have the wanted shape, and no other candidate fits as well.
  bool is_unique = false;
};

// Candidate names with their shapes. The candidates are names with the same ending, because a
// prefix is the most frequent difference. If none of these has the wanted shape, names of that
// shape with few edits are added. Not thread-safe, because it limits its total work.
class NearestNames {
 public:
  // `name` and `shape` must outlive this object. `shape` is null if it is unknown.
  void add(std::string_view name, const Shape* shape);
  [[nodiscard]] std::size_t size() const noexcept { return names_.size(); }

  // Returns at most `count_max` candidates. Those of the given shape come before all others. Of
  // names that differ only in their numbers, one with the numbers of `name` fits best.
  [[nodiscard]] Nearest nearest(std::string_view name, const Shape& shape, std::size_t count_max);

 private:
  struct Entry {
    std::string_view name;
    const Shape* shape;
  };

  void collect_by_ending(std::string_view name, std::vector<std::size_t>& found) const;
  // Returns the number of candidates with the fewest edits, which come first.
  std::size_t collect_by_edits(std::string_view name, const Shape& shape,
                               std::vector<std::size_t>& found);
  bool put_same_numbers_first(std::string_view name, std::span<std::size_t> equals) const;

  std::vector<Entry> names_;
  // Maps each whole name, and each part after a dot, to the first few names that end with it.
  NameMap<std::vector<std::uint32_t>> endings_;
  std::unordered_map<std::uint64_t, std::vector<std::uint32_t>> shapes_;
  std::uint64_t comparisons_ = 0;
};

// Suggests a rename rule, as JSON, that maps `source` to `target`. If both names contain the same
// numbers in the same order, the rule uses groups for them, so that it applies to all layers.
[[nodiscard]] std::string suggested_rule(std::string_view source, std::string_view target);

}  // namespace loadstone
