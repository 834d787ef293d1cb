// Translates regular expressions of Python's `re` module for RE2.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace loadstone {

// Returns a pattern with which RE2 matches like Python's `re.match` with `pattern`, from the first
// character, for names that is_plain_name() accepts. RE2's own syntax is similar, but silently
// gives `{,3}`, `[[:digit:]]`, `\C` and others a different meaning or none.
//
// Throws Error with this code and field for a pattern that Python rejects, and for one that cannot
// be translated: look-around, back-references, possessive quantifiers, atomic groups, conditions,
// verbose syntax, `\B`, `\z`, `\N{...}`, numeric escapes, more than 1,000 repeats.
[[nodiscard]] std::string re2_of_python(std::string_view pattern, const char* code,
                                        const std::string& field);

// Matches the names that `text` and all of `needed` match, and none of `excluded` matches.
struct Re2Match {
  std::string text;
  std::vector<std::string> needed;
  std::vector<std::string> excluded;
  // True if `text` may match additional names, because look-around inside the pattern was removed.
  bool is_wider = false;
};

// Like re2_of_python(), but also reads flags and look-ahead at the beginning: `(?i)^(?!lm_head).*`.
// Rejects look-ahead that belongs to only one of several alternatives.
[[nodiscard]] Re2Match re2_match_of_python(std::string_view pattern, const char* code,
                                           const std::string& field);

// Returns true if all characters are ASCII and not newlines. For other characters, Python's
// classes, `.`, `$` and case folding would need Unicode tables.
[[nodiscard]] bool is_plain_name(std::string_view name) noexcept;

}  // namespace loadstone
