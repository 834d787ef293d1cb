// Regular expressions of Python's `re` module, translated for RE2.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace loadstone {

// Text that RE2 matches as Python's `re.match` matches `pattern`, from the first character on, for
// names that is_plain_name() accepts. RE2's own syntax is close, but gives `{,3}`, `[[:digit:]]`,
// `\C` and others a different meaning or none, without a word.
//
// Throws Error with this code and field for a pattern that Python rejects, and for one that cannot
// be translated: look-around, back-references, possessive quantifiers, atomic groups, conditions,
// verbose syntax, `\B`, `\z`, `\N{...}`, numeric escapes, more than 1,000 repeats.
[[nodiscard]] std::string re2_of_python(std::string_view pattern, const char* code,
                                        const std::string& field);

// Matches names that `text` and all of `needed` match, and none of `excluded`.
struct Re2Match {
  std::string text;
  std::vector<std::string> needed;
  std::vector<std::string> excluded;
  // `text` may match other names, too: look-around inside of the pattern is left out.
  bool is_wider = false;
};

// Does the same, and reads flags and look-ahead at the beginning: `(?i)^(?!lm_head).*`. Rejects
// look-ahead that belongs to one of several alternatives.
[[nodiscard]] Re2Match re2_match_of_python(std::string_view pattern, const char* code,
                                           const std::string& field);

// Returns whether all characters are ASCII and none is a newline: for others Python's classes, `.`,
// `$` and case folding need tables of Unicode.
[[nodiscard]] bool is_plain_name(std::string_view name) noexcept;

}  // namespace loadstone
