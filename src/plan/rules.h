// Compiles rules so that they can be matched against names.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/pattern.h"
#include "boxes/view.h"
#include "loadstone/recipe.h"

namespace loadstone {

// A replacement text with references to groups, such as "model.$1.weight". Value type.
class Template {
 public:
  // Throws Error "plan.rules" that names `field` if a '$' is followed by neither a digit from 1 to
  // 9 nor another '$'.
  Template(std::string_view text, const std::string& field);
  // Escapes `text` so that fill() returns it unchanged.
  [[nodiscard]] static std::string quoted(std::string_view text);

  [[nodiscard]] std::string fill(const std::vector<std::string_view>& groups) const;
  [[nodiscard]] bool uses(std::size_t group) const noexcept { return (used_ >> group & 1u) != 0; }
  [[nodiscard]] std::size_t group_max() const noexcept;

 private:
  struct Part {
    std::string text;
    std::size_t group = 0;  // 0 if the part has text only
  };
  std::vector<Part> parts_;
  unsigned used_ = 0;  // bit i is set if group i is used
};

struct CompiledRule {
  Rule rule;
  std::vector<Pattern> patterns;
  std::vector<Template> targets;
};

// The match of a name. groups[0] is the first group. The groups are views of the name.
struct RuleMatch {
  std::uint32_t rule = 0;
  std::uint32_t pattern = 0;
  std::vector<std::string_view> groups;
};

// Thread-safe after construction.
class CompiledRules {
 public:
  // Throws Error "plan.rules" that names the rule's index and the field.
  explicit CompiledRules(const Rules& rules);

  [[nodiscard]] const std::vector<CompiledRule>& rules() const noexcept { return rules_; }
  // Finds the first rule, and its first pattern, that matches the whole name. Returns false if no
  // rule matches.
  [[nodiscard]] bool match(std::string_view name, RuleMatch& match) const;

 private:
  std::vector<CompiledRule> rules_;
};

// Returns true if the JSON contains rules rather than recipes: it is a list, or an object whose
// first value is a string.
[[nodiscard]] bool is_rules_json(std::string_view text) noexcept;

// Number of tensors that an operation reads and makes. `step` reads one tensor and makes one.
enum class OpKind : std::uint8_t { name_only, joins, cuts, step };
enum class Count : std::uint8_t { none, one, two, all, any };

// All properties of an operation, except its implementation.
struct RuleOpRow {
  std::string_view name;
  OpKind kind = OpKind::name_only;
  Count dims = Count::none;  // Count::all: one for each dimension
  Count sizes = Count::none;
  bool has_start = false;
};

// The only table of operations. The compiler reports an operation that has no entry.
// clang-format off
[[nodiscard]] constexpr RuleOpRow rule_op_row(RuleOp op) noexcept {
  switch (op) {
    case RuleOp::rename: return {"rename"};
    case RuleOp::stack: return {"stack", OpKind::joins, Count::one};
    case RuleOp::concat: return {"concat", OpKind::joins, Count::one};
    case RuleOp::stack_concat: return {"stack_concat", OpKind::joins, Count::two};
    case RuleOp::split: return {"split", OpKind::cuts, Count::one, Count::any};
    case RuleOp::transpose: return {"transpose", OpKind::step, Count::two};
    case RuleOp::permute: return {"permute", OpKind::step, Count::all};
    case RuleOp::slice: return {"slice", OpKind::step, Count::one, Count::one, true};
    case RuleOp::reshape: return {"reshape", OpKind::step, Count::none, Count::any};
  }
  return {};
}
// clang-format on

// Returns true if many sources make one target.
[[nodiscard]] constexpr bool joins_sources(RuleOp op) noexcept {
  return rule_op_row(op).kind == OpKind::joins;
}

// Applies one operation to one view: transpose, permute, slice or reshape. A rename changes
// nothing.
[[nodiscard]] std::optional<Problem> apply_step(const RuleStep& step, View& view);

// Returns the name that the pattern would match if its groups had these values, for messages about
// a missing source. Empty if the pattern contains more than literal text and groups.
[[nodiscard]] std::string fill_pattern(const re2::RE2& pattern,
                                       const std::vector<std::string_view>& groups);

}  // namespace loadstone
