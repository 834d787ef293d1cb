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
  expression,    // "re:" and an expression for the beginning of the name, or the whole name
  wildcard,      // Python's fnmatch
  up_to_a_dot,   // an expression or text for the name up to a dot, or the end of the name
  before_a_dot,  // the name, its last part, or any text in it before a dot
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
constexpr std::size_t comparisons_max = 10'000'000;  // comparisons of expressions with names
constexpr std::string_view expression_prefix = "re:";
constexpr std::string_view targets_list = "targets";

// Class names that compressed-tensors compares with the classes of a module and their bases.
constexpr std::string_view class_of_all = "Module";
constexpr std::string_view class_of_linear = "Linear";
constexpr std::string_view class_of_embedding = "Embedding";

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
Re2Match expression_of(std::string_view entry, Rule rule) {
  if (rule == Rule::wildcard) return {.text = expression_of_wildcard(entry)};
  if (rule == Rule::expression) entry.remove_prefix(expression_prefix.size());
  Re2Match match = re2_match_of_python(entry, "q.config", "entry");
  if (rule == Rule::up_to_a_dot) match.text = fmt::format("(?:{})(?:\\.|$)", match.text);
  return match;
}

class Expression {
 public:
  // Throws Error for expressions that the library itself rejects, and for expressions that RE2 does
  // not support.
  Expression(const std::string& entry, Rule rule, std::int64_t memory) : entry_(&entry) {
    const Re2Match match = expression_of(entry, rule);
    is_wider_ = match.is_wider;
    const std::size_t count = 1 + match.needed.size() + match.excluded.size();
    const auto compiled = [&](std::string_view text) {
      return compile_pattern(fmt::format("^(?:{})", text), "q.config", "entry",
                             memory / static_cast<std::int64_t>(count));
    };
    needed_.push_back(compiled(match.text));
    for (const std::string& text : match.needed) needed_.push_back(compiled(text));
    for (const std::string& text : match.excluded) excluded_.push_back(compiled(text));
  }

  [[nodiscard]] bool matches(std::string_view module) const {
    const auto is_found = [&](const Pattern& each) { return is_in(*each, module); };
    return is_plain_name(module) && std::ranges::all_of(needed_, is_found) &&
           std::ranges::none_of(excluded_, is_found);
  }
  [[nodiscard]] const std::string& entry() const noexcept { return *entry_; }
  // Returns true if the expression may match names that the entry does not.
  [[nodiscard]] bool is_wider() const noexcept { return is_wider_; }

 private:
  const std::string* entry_;
  bool is_wider_;
  std::vector<Pattern> needed_;
  std::vector<Pattern> excluded_;
};

// Returns true if the module's name is like that of an embedding, which is not of class Linear. The
// name may be misleading, so find_class() accepts Linear for all modules of a list of targets.
bool may_be_embedding(std::string_view module) {
  const std::string_view last = module.substr(module.rfind('.') + 1);
  return last.find("embed") != last.npos || last == "wte" || last == "wpe";
}

class Matcher {
 public:
  Matcher(const ConfigList& list, Rule rule, std::span<const std::string_view> modules)
      : rule_(rule), is_of_targets_(list.key == targets_list) {
    const std::size_t most =
        std::min(expressions_max, comparisons_max / std::max<std::size_t>(modules.size(), 1));
    for (const std::string& entry : list.entries) {
      if (rule == Rule::up_to_a_dot || rule == Rule::before_a_dot) sizes_.insert(entry.size());
      names_.insert(entry);
    }
    const auto is_tried = [rule](const std::string& entry) { return is_expression(entry, rule); };
    const auto count = static_cast<std::size_t>(std::ranges::count_if(list.entries, is_tried));
    if (count > most) reason_ = fmt::format("there are more than {} patterns", most);
    for (const std::string& entry : list.entries) {
      if (!is_tried(entry)) continue;
      if (count > most) {
        unread_.push_back(entry);
        continue;
      }
      try {
        Expression expression(entry, rule, pattern_memory(count));
        const auto is_matched = [&](std::string_view each) { return expression.matches(each); };
        if (!expression.is_wider()) {
          expressions_.push_back(std::move(expression));
        } else if (std::ranges::any_of(modules, is_matched)) {
          if (unread_.empty()) reason_ = "a look-ahead or look-behind inside a pattern";
          unread_.push_back(entry);
        }
      } catch (const Error& error) {
        if (unread_.empty()) reason_ = error.message();
        unread_.push_back(entry);
      }
    }
  }

  [[nodiscard]] const std::vector<std::string>& unread() const noexcept { return unread_; }
  [[nodiscard]] const std::string& reason() const noexcept { return reason_; }

  // Returns an entry that matches, or null.
  [[nodiscard]] const std::string* find(std::string_view module) const {
    if (const std::string* const same = find_name(module)) return same;
    if (rule_ == Rule::expression) {
      if (const std::string* const its_class = find_class(module)) return its_class;
    }
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
      if (each.matches(module)) return &each.entry();
    }
    return nullptr;
  }

 private:
  [[nodiscard]] const std::string* find_name(std::string_view name) const {
    const auto found = names_.find(name);
    return found == names_.end() ? nullptr : &*found;
  }

  // Returns an entry that is a class of the module, or null.
  [[nodiscard]] const std::string* find_class(std::string_view module) const {
    const bool is_embedding = may_be_embedding(module);
    if (const auto* const any = find_name(class_of_all)) return any;
    if (!is_embedding || is_of_targets_) {
      if (const auto* const linear = find_name(class_of_linear)) return linear;
    }
    return is_embedding ? find_name(class_of_embedding) : nullptr;
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
  bool is_of_targets_;
  std::set<std::string, std::less<>> names_;
  std::set<std::size_t> sizes_;  // lengths of the entries that may be parts of names
  std::vector<Expression> expressions_;
  std::vector<std::string> unread_;
  std::string reason_;
};

std::string_view parent_of(std::string_view module) {
  return module.substr(0, std::min(module.rfind('.'), module.size()));
}

// Returns true if an entry of a list of targets may be the name of a class. No file shows the
// classes of modules.
bool may_be_class(std::string_view entry) {
  return !entry.starts_with(expression_prefix) && entry.find('.') == entry.npos &&
         entry != class_of_all && entry != class_of_linear && entry != class_of_embedding;
}

void add_lacking(const ConfigList& list, const Matcher& matcher,
                 std::span<const std::string_view> modules, LeftPlain& left) {
  std::set<std::string_view> parents;  // of modules that an entry matches
  std::set<std::string_view> used;
  std::vector<std::string_view> others;
  for (const std::string_view module : modules) {
    const std::string* const entry = matcher.find(module);
    if (entry == nullptr) {
      others.push_back(module);
    } else {
      parents.insert(parent_of(module));
      used.insert(*entry);
    }
  }
  if (others.empty()) return;
  left.unread = matcher.unread();
  left.reason = matcher.reason();
  for (const std::string& entry : list.entries) {
    if (!may_be_class(entry) || used.contains(entry)) continue;
    if (left.unread.empty())
      left.reason = "the checkpoint does not show the classes of its modules";
    left.unread.push_back(entry);
  }
  if (!left.unread.empty()) return;
  const bool names_all = std::ranges::all_of(
      list.entries, [&](const std::string& entry) { return used.contains(entry); });
  for (const std::string_view module : others) {
    if (names_all || parents.contains(parent_of(module))) left.modules.emplace_back(module);
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
  if (known == known_lists.end()) return left;
  const Matcher matcher(list, known->rule, modules);
  if (list.key == targets_list) {
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
  if (left.modules.size() < modules.size()) {
    left.unread = matcher.unread();
    left.reason = matcher.reason();
  }
  return left;
}

}  // namespace loadstone
