#include "plan/rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>

#include "base/named.h"
#include "base/text.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

constexpr std::size_t rules_max = 10'000;
constexpr std::size_t patterns_max = 64;  // per rule
constexpr std::size_t targets_max = 4096;
constexpr std::size_t groups_max = 32;

[[noreturn]] void refuse_rules(const std::string& field, std::string message,
                               std::string found = {}, std::string expected = {}) {
  throw Error("plan.rules", std::move(message),
              {.field = field, .found = std::move(found), .expected = std::move(expected)});
}

void check_count(const std::string& field, Count wanted, std::size_t found) {
  const auto want = [&](bool fits, const char* expected) {
    if (!fits)
      refuse_rules(field, "the number of values is wrong", fmt::format("{}", found), expected);
  };
  switch (wanted) {
    case Count::none:
      return want(found == 0, "none");
    case Count::one:
      return want(found == 1, "one");
    case Count::two:
      return want(found == 2, "two");
    case Count::all:
      return want(found != 0, "one for each dimension");
    case Count::any:
      return;
  }
}

void check_counts(const std::string& at, const RuleStep& step) {
  const RuleOpRow row = rule_op_row(step.op);
  check_count(at + (row.dims == Count::one ? ".dim" : ".dims"), row.dims, step.dims.size());
  check_count(at + ".sizes", row.sizes, step.sizes.size());
  if (!row.has_start && step.start != 0)
    refuse_rules(at + ".start", "only a slice can have a start");
}

void check_rule(const std::string& at, const Rule& rule) {
  if (rule.sources.empty() || rule.sources.size() > patterns_max) {
    refuse_rules(at + ".sources", "the number of patterns is wrong",
                 fmt::format("{}", rule.sources.size()), fmt::format("1 to {}", patterns_max));
  }
  const std::size_t targets = rule.targets.size();
  if (rule.op == RuleOp::split ? targets == 0 || targets > targets_max : targets != 1) {
    refuse_rules(at + ".targets", "the number of templates is wrong", fmt::format("{}", targets),
                 rule.op == RuleOp::split ? fmt::format("1 to {}", targets_max) : "one");
  }
  if (rule.op == RuleOp::split && !rule.sizes.empty() && rule.sizes.size() != targets) {
    refuse_rules(at + ".sizes", "a split needs one size for each target",
                 fmt::format("{}", rule.sizes.size()), fmt::format("{} or none", targets));
  }
  check_counts(at, {rule.op, rule.dims, rule.sizes, rule.start});
  for (std::size_t i = 0; i < rule.then.size(); ++i) {
    const RuleStep& step = rule.then[i];
    const std::string field = fmt::format("{}.then[{}]", at, i);
    const auto is_step = [](RuleOp op) { return rule_op_row(op).kind == OpKind::step; };
    if (!is_step(step.op)) {
      refuse_rules(field + ".op", "a step must be an operation on one tensor",
                   std::string(name(step.op)), either(names_of<RuleOp>(is_step)));
    }
    check_counts(field, step);
  }
}

Pattern compile_source(const std::string& text, const std::string& field, std::int64_t memory_max) {
  Pattern pattern = compile_pattern(text, "plan.rules", field, memory_max);
  if (pattern->NumberOfCapturingGroups() > static_cast<int>(groups_max)) {
    refuse_rules(field, "the pattern has too many groups",
                 fmt::format("{}", pattern->NumberOfCapturingGroups()),
                 fmt::format("at most {}", groups_max));
  }
  return pattern;
}

CompiledRule compile_rule(const Rule& rule, std::size_t index, std::int64_t memory_max) {
  const std::string at = fmt::format("rules[{}]", index);
  check_rule(at, rule);
  CompiledRule compiled;
  compiled.rule = rule;
  std::size_t groups = groups_max;
  for (std::size_t i = 0; i < rule.sources.size(); ++i) {
    auto pattern =
        compile_source(rule.sources[i], fmt::format("{}.sources[{}]", at, i), memory_max);
    groups = std::min(groups, static_cast<std::size_t>(pattern->NumberOfCapturingGroups()));
    compiled.patterns.push_back(std::move(pattern));
  }
  for (std::size_t i = 0; i < rule.targets.size(); ++i) {
    const std::string field = fmt::format("{}.targets[{}]", at, i);
    compiled.targets.emplace_back(rule.targets[i], field);
    const std::size_t used = compiled.targets.back().group_max();
    if (used > groups) {
      refuse_rules(
          field,
          fmt::format("a template contains ${}, but a pattern has only {} groups", used, groups),
          rule.targets[i]);
    }
  }
  return compiled;
}

// Returns the index of the bracket that closes the group whose content starts at `at`, or npos if
// another group opens inside it.
std::size_t group_end(std::string_view text, std::size_t at) {
  bool in_class = false;
  for (; at < text.size(); ++at) {
    if (text[at] == '\\') {
      ++at;
    } else if (in_class) {
      in_class = text[at] != ']';
    } else if (text[at] == '[') {
      in_class = true;
      if (text.substr(at + 1).starts_with('^')) ++at;
      if (text.substr(at + 1).starts_with(']')) ++at;  // a first ']' is part of the class
    } else if (text[at] == '(') {
      return std::string_view::npos;
    } else if (text[at] == ')') {
      return at;
    }
  }
  return std::string_view::npos;
}

}  // namespace

Template::Template(std::string_view text, const std::string& field) {
  Part part;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '$') {
      part.text += text[i];
      continue;
    }
    const char next = i + 1 < text.size() ? text[i + 1] : '\0';
    if (next == '$') {
      part.text += '$';
    } else if (next >= '1' && next <= '9') {
      part.group = static_cast<std::size_t>(next - '0');
      used_ |= 1u << part.group;
      parts_.push_back(std::move(part));
      part = {};
    } else {
      refuse_rules(field,
                   "a template has a '$' without a group; write $1 to $9, or $$ for a dollar sign",
                   std::string(text));
    }
    ++i;
  }
  parts_.push_back(std::move(part));
}

std::string Template::quoted(std::string_view text) {
  std::string made;
  for (const char character : text) made += character == '$' ? "$$" : std::string(1, character);
  return made;
}

std::string Template::fill(const std::vector<std::string_view>& groups) const {
  std::string text;
  for (const Part& part : parts_) {
    text += part.text;
    if (part.group > 0 && part.group <= groups.size()) text += groups[part.group - 1];
  }
  return text;
}

std::size_t Template::group_max() const noexcept {
  return used_ == 0 ? 0 : static_cast<std::size_t>(std::bit_width(used_)) - 1;
}

std::string_view name(RuleOp op) noexcept { return rule_op_row(op).name; }

CompiledRules::CompiledRules(const Rules& rules) {
  if (rules.size() > rules_max) {
    refuse_rules("rules", "there are too many rules", fmt::format("{}", rules.size()),
                 fmt::format("at most {}", rules_max));
  }
  std::size_t patterns = 0;
  for (const Rule& rule : rules) patterns += rule.sources.size();
  if (patterns > rules_max) {
    refuse_rules("rules", "there are too many patterns", fmt::format("{}", patterns),
                 fmt::format("at most {}", rules_max));
  }
  rules_.reserve(rules.size());
  for (std::size_t i = 0; i < rules.size(); ++i) {
    rules_.push_back(compile_rule(rules[i], i, pattern_memory(patterns)));
  }
}

bool CompiledRules::match(std::string_view name, RuleMatch& match) const {
  const re2::StringPiece text = piece(name);
  std::array<re2::StringPiece, groups_max + 1> pieces;
  for (std::size_t r = 0; r < rules_.size(); ++r) {
    for (std::size_t p = 0; p < rules_[r].patterns.size(); ++p) {
      const re2::RE2& pattern = *rules_[r].patterns[p];
      // Most patterns do not match most names, and a match without groups is much cheaper.
      if (!pattern.Match(text, 0, text.size(), re2::RE2::ANCHOR_BOTH, nullptr, 0)) continue;
      const int groups = pattern.NumberOfCapturingGroups();
      pattern.Match(text, 0, text.size(), re2::RE2::ANCHOR_BOTH, pieces.data(), groups + 1);
      match.rule = static_cast<std::uint32_t>(r);
      match.pattern = static_cast<std::uint32_t>(p);
      match.groups.clear();
      for (int g = 1; g <= groups; ++g) {
        const re2::StringPiece& piece = pieces[static_cast<std::size_t>(g)];
        // A group that did not take part in the match has a null pointer.
        const char* const data = piece.data() == nullptr ? name.data() : piece.data();
        match.groups.emplace_back(data, piece.size());
      }
      return true;
    }
  }
  return false;
}

std::optional<Problem> apply_step(const RuleStep& step, View& view) {
  switch (step.op) {
    case RuleOp::transpose:
      return transpose(view, step.dims[0], step.dims[1]);
    case RuleOp::permute:
      return permute(view, step.dims);
    case RuleOp::slice:
      return slice(view, step.dims[0], step.start, step.sizes[0]);
    case RuleOp::reshape:
      return reshape(view, Shape(step.sizes));
    case RuleOp::rename:
    case RuleOp::stack:
    case RuleOp::concat:
    case RuleOp::stack_concat:
    case RuleOp::split:
      break;  // handled elsewhere
  }
  return std::nullopt;
}

std::string fill_pattern(const re2::RE2& pattern, const std::vector<std::string_view>& groups) {
  const std::string& text = pattern.pattern();
  std::string name;
  std::size_t group = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char character = text[i];
    const char next = i + 1 < text.size() ? text[i + 1] : '\0';
    if (character == '\\') {
      if (next == '\0' || std::isalnum(static_cast<unsigned char>(next)) != 0) return {};
      name += next;
      ++i;
    } else if (character == '(') {
      if (next == '?' || group >= groups.size()) return {};
      name += groups[group++];
      i = group_end(text, i + 1);
      if (i == std::string::npos) return {};
    } else if (std::string_view("*+?[]{}|)").find(character) != std::string_view::npos) {
      return {};
    } else if (character != '^' && character != '$') {
      // An unescaped dot is taken literally, because the backslash is often forgotten.
      name += character;
    }
  }
  return re2::RE2::FullMatch(name, pattern) ? name : std::string();
}

}  // namespace loadstone
