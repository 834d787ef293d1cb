// Matches regular expressions against names. Both are untrusted, so RE2 is used: it runs in linear
// time and does not overflow the stack.
#pragma once

#include <re2/re2.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace loadstone {

using Pattern = std::unique_ptr<const re2::RE2>;

// Converts to RE2's string type: its own class in old releases, Abseil's string_view in new ones.
inline re2::StringPiece piece(std::string_view text) { return {text.data(), text.size()}; }

// Memory for RE2's programs and caches, over all patterns that are used together.
inline constexpr std::int64_t patterns_memory_max = std::int64_t{128} << 20;
// Returns RE2's memory limit per pattern. A pattern that needs more is rejected as too large. A
// pattern whose cache is full is matched more slowly.
[[nodiscard]] std::int64_t pattern_memory(std::size_t patterns) noexcept;

// Throws Error with `code` and `field` if the pattern is invalid or too long.
[[nodiscard]] Pattern compile_pattern(std::string_view text, const char* code, std::string field,
                                      std::int64_t memory_max);

// Returns true if the pattern matches anywhere in a name.
[[nodiscard]] bool is_in(const re2::RE2& pattern, std::string_view name);

// An ordered list of patterns. The first pattern that matches a whole name applies. Thread-safe
// after construction.
class NamePatterns {
 public:
  // Throws Error "plan.options" that names `field`.
  NamePatterns(const std::vector<std::string>& texts, const std::string& field);

  [[nodiscard]] std::optional<std::size_t> first_match(std::string_view name) const;
  [[nodiscard]] std::vector<std::string> texts() const;

 private:
  std::vector<Pattern> patterns_;
};

// Returns the number of matches per pattern as text: "'a.*' takes 3 names, 'b' none".
[[nodiscard]] std::string counts_text(const std::vector<std::string>& patterns,
                                      const std::vector<std::size_t>& counts);

}  // namespace loadstone
