// Rules made ready to match names.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/pattern.h"
#include "boxes/view.h"
#include "loadstone/recipe.h"

namespace loadstone {

// Text with groups to fill in: "model.$1.weight". Value type.
class Template {
 public:
  // Throws Error "plan.rules" with `field` for a '$' that is followed by neither 1 to 9 nor '$'.
  Template(std::string_view text, const std::string& field);
  // The text of a template that is filled as this text.
  [[nodiscard]] static std::string quoted(std::string_view text);

  [[nodiscard]] std::string fill(const std::vector<std::string_view>& groups) const;
  [[nodiscard]] bool uses(std::size_t group) const noexcept { return (used_ >> group & 1u) != 0; }
  [[nodiscard]] std::size_t group_max() const noexcept;

 private:
  struct Part {
    std::string text;
    std::size_t group = 0;  // 0: text only
  };
  std::vector<Part> parts_;
  unsigned used_ = 0;  // bit i: group i
};

struct CompiledRule {
  Rule rule;
  std::vector<Pattern> patterns;
  std::vector<Template> targets;
};

// The match of a name: groups[0] is the first group. Views into the name.
struct RuleMatch {
  std::uint32_t rule = 0;
  std::uint32_t pattern = 0;
  std::vector<std::string_view> groups;
};

// Thread-safe once made.
class CompiledRules {
 public:
  // Throws Error "plan.rules" that names the rule's index and field.
  explicit CompiledRules(const Rules& rules);

  [[nodiscard]] const std::vector<CompiledRule>& rules() const noexcept { return rules_; }
  // Finds the first rule and pattern that match the whole name. Returns false if no rule matches.
  [[nodiscard]] bool match(std::string_view name, RuleMatch& match) const;

 private:
  std::vector<CompiledRule> rules_;
};

// Returns true for the JSON of rules rather than recipes: a list, or an object that begins with a
// text.
[[nodiscard]] bool is_rules_json(std::string_view text) noexcept;

// Number of tensors that an operation reads and makes: a step is from one to one.
enum class OpKind : std::uint8_t { name_only, joins, cuts, step };
enum class Count : std::uint8_t { none, one, two, all, any };

// All properties of an operation, except its implementation.
struct RuleOpRow {
  std::string_view name;
  OpKind kind = OpKind::name_only;
  Count dims = Count::none;  // all: one for each dimension
  Count sizes = Count::none;
  bool has_start = false;
};

// The only list of what operations are: who adds one is led here by the compiler.
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

// One operation on one view: transpose, permute, slice, reshape; rename does nothing.
[[nodiscard]] std::optional<Problem> apply_step(const RuleStep& step, View& view);

// A name that the pattern would match if its groups held these values; empty when the pattern is
// more than literal text and groups. What a missing source would be called.
[[nodiscard]] std::string fill_pattern(const re2::RE2& pattern,
                                       const std::vector<std::string_view>& groups);

}  // namespace loadstone
