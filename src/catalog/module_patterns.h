// Matches names of modules with the keys of an adapter's `rank_pattern` and `alpha_pattern`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/pattern.h"

namespace loadstone {

// Follows PEFT's rule: the first key for which Python's `re.match(rf"(.*\.)?({key})$", module)`
// matches, otherwise the key that equals the module's name. Finds keys that are plain names by a
// lookup (their "." still matches any character), and tries all other keys in order. Not thread-
// safe, because it counts comparisons.
class ModulePatterns {
 public:
  static constexpr std::size_t keys_max = 100'000;
  static constexpr std::size_t expressions_max = 10'000;        // keys that are not names
  static constexpr std::uint64_t comparisons_max = 10'000'000;  // takes a few seconds

  ModulePatterns() = default;
  // Throws Error with this code and field for too many keys, and for keys that re2_of_python()
  // rejects.
  ModulePatterns(const std::vector<std::string_view>& keys, const char* code, std::string field);

  // Returns the key's index. If there are keys, throws Error for a name that is not plain, and if
  // all calls together make more than `comparisons_max` comparisons.
  [[nodiscard]] std::optional<std::size_t> find(std::string_view module) const;
  // Returns the indices of all matching keys, in order; find() returns the first. Throws like
  // find().
  [[nodiscard]] std::vector<std::size_t> find_all(std::string_view module) const;

  // Returns the number of look-ups and tried patterns of all calls.
  [[nodiscard]] std::uint64_t comparisons() const noexcept { return comparisons_; }

 private:
  using Places = std::vector<std::size_t>;
  using Indices = std::unordered_map<std::string, std::size_t>;
  struct Expression {
    Pattern pattern;
    std::size_t index = 0;
  };

  void require_plain(std::string_view module) const;
  // Returns the indices of keys that are names and match, in no order.
  [[nodiscard]] std::vector<std::size_t> find_names(std::string_view module) const;
  void count() const;

  const char* code_ = "";
  std::string field_;
  // Keys that are names, by their length and by the positions that match any character. The text
  // has "." at these positions.
  std::map<std::size_t, std::map<Places, Indices>> names_;
  std::vector<Expression> expressions_;  // in the order of their keys
  Indices keys_;
  mutable std::uint64_t comparisons_ = 0;
};

}  // namespace loadstone
