#include "catalog/module_patterns.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "base/python_pattern.h"
#include "base/text.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

constexpr std::size_t none = std::numeric_limits<std::size_t>::max();
constexpr std::size_t key_bytes_max = 4096;

struct Name {
  std::string text;
  std::vector<std::size_t> any;  // positions that match any character
};

// Returns nullopt if the key is a real expression, rather than a name in which "." matches any
// character.
std::optional<Name> name_of(std::string_view key) {
  constexpr std::string_view special = "^$*+?{}[]()|\\";
  constexpr std::string_view escapable = "^$*+?{}[]()|\\.-";
  Name name;
  for (std::size_t i = 0; i < key.size(); ++i) {
    char each = key[i];
    if (each == '\\' && i + 1 < key.size() && escapable.find(key[i + 1]) != escapable.npos) {
      each = key[++i];
    } else if (each == '.') {
      name.any.push_back(name.text.size());
    } else if (special.find(each) != special.npos || !is_plain_name(key.substr(i, 1))) {
      return std::nullopt;
    }
    name.text.push_back(each);
  }
  return name;
}

}  // namespace

ModulePatterns::ModulePatterns(const std::vector<std::string_view>& keys, const char* code,
                               std::string field)
    : code_(code), field_(std::move(field)) {
  const auto refuse = [&](const char* message, std::size_t found, std::size_t most) {
    throw Error(code_, message,
                {.field = field_,
                 .found = std::to_string(found),
                 .expected = fmt::format("at most {}", most)});
  };
  if (keys.size() > keys_max) refuse("there are too many patterns", keys.size(), keys_max);
  std::vector<std::pair<std::string, std::size_t>> expressions;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (keys[i].size() > key_bytes_max) {
      refuse("the pattern is too long", keys[i].size(), key_bytes_max);
    }
    keys_.emplace(keys[i], i);
    if (auto name = name_of(keys[i])) {
      const std::size_t length = name->text.size();
      names_[length][std::move(name->any)].emplace(std::move(name->text), i);
      continue;
    }
    if (expressions.size() == expressions_max) {
      refuse("too many patterns are not plain names", expressions_max + 1, expressions_max);
    }
    expressions.emplace_back(re2_of_python(fmt::format("(.*\\.)?({})$", keys[i]), code_, field_),
                             i);
  }
  const std::int64_t memory = pattern_memory(expressions.size());
  for (const auto& [text, index] : expressions) {
    expressions_.push_back({compile_pattern(text, code_, field_, memory), index});
  }
}

void ModulePatterns::count() const {
  if (++comparisons_ <= comparisons_max) return;
  throw Error(code_, "there are too many patterns for this number of modules",
              {.field = field_,
               .found = fmt::format("{} patterns, of which {} are not plain names", keys_.size(),
                                    expressions_.size()),
               .expected = fmt::format("at most {} comparisons", comparisons_max)});
}

// A key matches the whole name of a module, or its end after a ".".
std::vector<std::size_t> ModulePatterns::find_names(std::string_view module) const {
  std::vector<std::size_t> matches;
  for (std::size_t begin = 0;; ++begin) {
    const std::string_view end = module.substr(begin);
    if (const auto of_length = names_.find(end.size()); of_length != names_.end()) {
      for (const auto& [any, indices] : of_length->second) {
        count();
        std::string text(end);
        for (const std::size_t place : any) text[place] = '.';
        const auto found = indices.find(text);
        if (found != indices.end()) matches.push_back(found->second);
      }
    }
    begin = module.find('.', begin);
    if (begin == module.npos) return matches;
  }
}

void ModulePatterns::require_plain(std::string_view module) const {
  if (is_plain_name(module)) return;
  throw Error(code_, "the name of a module has characters that are not ASCII, or a newline",
              {.tensor = std::string(module),
               .field = field_,
               .expected = "an ASCII name without a newline"});
}

std::vector<std::size_t> ModulePatterns::find_all(std::string_view module) const {
  if (keys_.empty()) return {};
  require_plain(module);
  std::vector<std::size_t> matches = find_names(module);
  for (const Expression& each : expressions_) {
    count();
    if (is_in(*each.pattern, module)) matches.push_back(each.index);
  }
  std::ranges::sort(matches);
  const auto same = keys_.find(std::string(module));
  if (matches.empty() && same != keys_.end()) matches.push_back(same->second);
  return matches;
}

std::optional<std::size_t> ModulePatterns::find(std::string_view module) const {
  if (keys_.empty()) return std::nullopt;
  require_plain(module);
  const std::vector<std::size_t> names = find_names(module);
  std::size_t first = names.empty() ? none : std::ranges::min(names);
  for (const Expression& each : expressions_) {
    if (each.index > first) break;
    count();
    if (is_in(*each.pattern, module)) first = each.index;
  }
  if (first != none) return first;
  const auto same = keys_.find(std::string(module));
  return same == keys_.end() ? std::nullopt : std::optional(same->second);
}

}  // namespace loadstone
