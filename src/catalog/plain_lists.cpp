#include "catalog/plain_lists.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <utility>

#include "base/pattern.h"
#include "base/python_pattern.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

enum class Rule : std::uint8_t {
  expression,    // "re:" and one that matches from the beginning on, else the name
  wildcard,      // Python's fnmatch
  up_to_a_dot,   // an expression for a beginning of the name up to a dot, or the name's end
  before_a_dot,  // the name, its last part, or any text in it that a dot follows
};

struct KnownList {
  std::string_view method;
  std::string_view key;
  Rule rule;
};
constexpr std::array<KnownList, 8> known_lists = {
    {{"compressed-tensors", "ignore", Rule::expression},
     {"compressed-tensors", "targets", Rule::expression},
     {"modelopt", "ignore", Rule::wildcard},
     {"modelopt", "exclude_modules", Rule::wildcard},
     {"bitsandbytes", "llm_int8_skip_modules", Rule::up_to_a_dot},
     {method_of_diffusers, "llm_int8_skip_modules", Rule::before_a_dot},
     {"awq", "modules_to_not_convert", Rule::up_to_a_dot},
     {"fp8", "modules_to_not_convert", Rule::up_to_a_dot}}};

constexpr std::size_t expressions_max = 2000;
constexpr std::size_t comparisons_max = 2'000'000;  // of expressions with names
constexpr std::string_view expression_prefix = "re:";

std::string quoted(std::string_view text) { return re2::RE2::QuoteMeta(piece(text)); }

// Python's fnmatch.translate().
std::string expression_of_wildcard(std::string_view text) {
  std::string pattern;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const std::size_t end = text[i] == '[' ? text.find(']', i + 2) : text.npos;
    if (text[i] == '*') {
      pattern += ".*";
    } else if (text[i] == '?') {
      pattern += '.';
    } else if (end != text.npos) {
      std::string_view set = text.substr(i + 1, end - i - 1);
      const bool is_negated = set.front() == '!';
      if (is_negated) set.remove_prefix(1);
      pattern += is_negated ? "[^" : "[";
      for (const char each : set) {
        if (each == '\\' || each == '[' || each == ']' || each == '^') pattern += '\\';
        pattern += each;
      }
      pattern += ']';
      i = end;
    } else {
      pattern += quoted(text.substr(i, 1));
    }
  }
  return pattern + "$";
}

bool is_expression(std::string_view entry, Rule rule) {
  switch (rule) {
    case Rule::expression:
      return entry.starts_with(expression_prefix);
    case Rule::wildcard:
      return entry.find_first_of("*?[") != entry.npos;
    case Rule::up_to_a_dot:
      return entry.find_first_of("\\()[]{}^$|+*?") != entry.npos;
    case Rule::before_a_dot:
      return false;
  }
  return false;
}

// Throws Error.
std::string expression_of(std::string_view entry, Rule rule) {
  if (rule == Rule::wildcard) return expression_of_wildcard(entry);
  if (rule == Rule::expression) entry.remove_prefix(expression_prefix.size());
  std::string text = re2_of_python(entry, "q.config", "entry");
  return rule == Rule::expression ? text : fmt::format("(?:{})(?:\\.|$)", text);
}

// Null for text that the list's reader rejects too, and for text that needs more than RE2.
Pattern compiled(std::string_view entry, Rule rule, std::int64_t memory) {
  try {
    const std::string text = fmt::format("^(?:{})", expression_of(entry, rule));
    return compile_pattern(text, "q.config", "entry", memory);
  } catch (const Error&) {
    return nullptr;
  }
}

class Matcher {
 public:
  Matcher(const std::vector<std::string>& entries, Rule rule, std::size_t modules) : rule_(rule) {
    const std::size_t most =
        std::min(expressions_max, comparisons_max / std::max<std::size_t>(modules, 1));
    for (const std::string& entry : entries) {
      if (rule == Rule::up_to_a_dot || rule == Rule::before_a_dot) sizes_.insert(entry.size());
      names_.insert(entry);
    }
    const auto is_tried = [rule](const std::string& entry) { return is_expression(entry, rule); };
    const auto count = static_cast<std::size_t>(std::ranges::count_if(entries, is_tried));
    is_whole_ = count <= most;
    for (const std::string& entry : entries) {
      if (count > most || !is_tried(entry)) continue;
      if (auto pattern = compiled(entry, rule, pattern_memory(count))) {
        expressions_.push_back({std::move(pattern), &entry});
      } else {
        is_whole_ = false;
      }
    }
  }

  // False if some of the entries are not compared.
  [[nodiscard]] bool is_whole() const noexcept { return is_whole_; }

  // Returns an entry that matches, or null.
  [[nodiscard]] const std::string* find(std::string_view module) const {
    if (const std::string* const same = find_name(module)) return same;
    if (rule_ == Rule::up_to_a_dot) {
      for (auto dot = module.find('.'); dot != module.npos; dot = module.find('.', dot + 1)) {
        if (const std::string* const around = find_name(module.substr(0, dot))) return around;
      }
      if (const std::string* const last = find_end(module)) return last;
    }
    if (rule_ == Rule::before_a_dot) {
      if (const auto* const last = find_name(module.substr(module.rfind('.') + 1))) return last;
      for (auto dot = module.find('.'); dot != module.npos; dot = module.find('.', dot + 1)) {
        if (const std::string* const part = find_end(module.substr(0, dot))) return part;
      }
    }
    for (const Expression& each : expressions_) {
      if (is_in(*each.pattern, module)) return each.entry;
    }
    return nullptr;
  }

 private:
  struct Expression {
    Pattern pattern;
    const std::string* entry;
  };

  [[nodiscard]] const std::string* find_name(std::string_view name) const {
    const auto found = names_.find(name);
    return found == names_.end() ? nullptr : &*found;
  }

  // Returns an entry that is the end of the text, or null.
  [[nodiscard]] const std::string* find_end(std::string_view text) const {
    for (const std::size_t size : sizes_) {
      if (size > text.size()) break;
      if (const auto* const end = find_name(text.substr(text.size() - size))) return end;
    }
    return nullptr;
  }

  Rule rule_;
  bool is_whole_ = true;
  std::set<std::string, std::less<>> names_;
  std::set<std::size_t> sizes_;  // of entries that may be parts of names
  std::vector<Expression> expressions_;
};

std::string_view parent_of(std::string_view module) {
  return module.substr(0, std::min(module.rfind('.'), module.size()));
}

// True if an entry of a list of targets may be the name of a class, which no file shows.
bool may_be_class(std::string_view entry) {
  return !entry.starts_with("re:") && entry.find('.') == entry.npos;
}

void add_lacking(const ConfigList& list, const Matcher& matcher,
                 std::span<const std::string_view> modules, LeftPlain& left) {
  if (!matcher.is_whole() || std::ranges::any_of(list.entries, may_be_class)) return;
  std::set<std::string_view> parents;  // of modules that are named
  std::vector<std::string_view> others;
  for (const std::string_view module : modules) {
    if (matcher.find(module) == nullptr) {
      others.push_back(module);
    } else {
      parents.insert(parent_of(module));
    }
  }
  for (const std::string_view module : others) {
    if (parents.contains(parent_of(module))) left.modules.emplace_back(module);
  }
  left.is_lacking = true;
  left.entries = list.entries;
}

}  // namespace

LeftPlain left_plain(const ConfigList& list, std::span<const std::string_view> modules) {
  LeftPlain left;
  const auto* const known = std::ranges::find_if(known_lists, [&](const KnownList& each) {
    return each.method == list.method && each.key == list.key;
  });
  if (known == known_lists.end() || !std::ranges::all_of(modules, is_plain_name)) return left;
  const Matcher matcher(list.entries, known->rule, modules.size());
  if (list.key == "targets") {
    add_lacking(list, matcher, modules, left);
    return left;
  }
  std::set<std::string> entries;
  for (const std::string_view module : modules) {
    const std::string* const entry = matcher.find(module);
    if (entry == nullptr) continue;
    entries.insert(*entry);
    left.modules.emplace_back(module);
  }
  left.entries.assign(entries.begin(), entries.end());
  return left;
}

}  // namespace loadstone
