// Matches tensor names against the caller's patterns and the rules of quantize_rules.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/pattern.h"
#include "convert/choose/quantize_rules.h"
#include "loadstone/convert.h"
#include "loadstone/finding.h"
#include "loadstone/quantization.h"
#include "loadstone/recipe.h"

namespace loadstone {

inline constexpr std::string_view no_encoding = "none";  // for tensors that stay unchanged

// Decides which tensors may be quantized, and the format of each. Not thread-safe. The options must
// outlive it.
class Chooser {
 public:
  // One format with its compiled pattern, which is null for the default.
  struct Format {
    Pattern pattern;
    const Quantization* quantization;
    std::size_t tensors = 0;  // number of tensors that match the pattern
    std::size_t made = 0;     // number of tensors that get the format
    std::string misfit{};     // the first tensor whose shape the encoding does not support, and why
  };

  // Throws Error "plan.options" for an invalid regular expression.
  Chooser(const QuantizeOptions& options, std::string_view config);

  [[nodiscard]] bool is_excluded(const std::string& name) const;
  [[nodiscard]] bool is_included(const std::string& name) const;
  // Returns the reason to keep the tensor unchanged; nullopt if it is quantized.
  [[nodiscard]] std::optional<std::string_view> reason(const TargetRecipe& recipe) const;
  // Returns the kind of layer that the name implies, such as "embedding", or a text for a tensor
  // that is not a weight; nullopt for the weight of a linear layer.
  [[nodiscard]] std::optional<std::string_view> other_layer(const std::string& name) const;
  // Returns the reason why transformers has no bitsandbytes layer for the tensor; nullopt if it has
  // one. `has`: returns true if the output has a tensor of this name.
  [[nodiscard]] std::optional<std::string_view> reason_in_bnb(
      const TargetRecipe& recipe, const std::function<bool(const std::string&)>& has) const;
  // Returns the first rule for this use that matches; null if no rule matches, or if the rule's
  // reason is PlainRule::is_read.
  [[nodiscard]] const PlainRule* first_rule(RuleUse use, const std::string& name) const;
  // Returns the first format whose pattern matches the name, or null.
  [[nodiscard]] Format* format_for(const std::string& name);
  // Returns the same format as format_for(), but null for the format "none".
  [[nodiscard]] Format* encoding_for(const std::string& name);
  // Returns a key that all tensors that share a scale have in common; empty if the tensor has its
  // own scale.
  [[nodiscard]] std::string group_of(const std::string& name) const;
  // Returns a pattern that matches the tensors of a group, and of the same modules in other layers.
  [[nodiscard]] static std::string pattern_of(std::string_view group);
  // Reports patterns without a match, and formats that no tensor gets. `names`: all candidate
  // tensors. `is_made`: returns true if a tensor gets the requested encoding.
  void report(const std::vector<std::string>& names,
              const std::function<bool(const std::string&)>& is_made,
              std::vector<Finding>& findings) const;

 private:
  // Reports a format that no tensor gets. Format "none" excludes tensors, so it only has to match
  // one.
  void report_format(const Format& format, const std::vector<std::string>& names, bool finds_name,
                     std::vector<Finding>& findings) const;

  // Returns true if the tensor belongs to a layer after the model's last one. Such layers are for
  // multi-token prediction.
  [[nodiscard]] bool is_beyond(const std::string& name) const;

  Pattern layer_;
  Pattern weight_;
  Pattern layer_number_;
  std::optional<std::uint64_t> layers_;
  std::vector<Format> formats_;
  std::vector<Pattern> include_;
  std::vector<Pattern> exclude_;
  std::vector<std::pair<Pattern, const PlainRule*>> rules_;  // rules for the model's type
  std::vector<Pattern> partners_;
};

// Returns the reason why no encoder accepts the recipe's values, or nullopt.
[[nodiscard]] std::optional<std::string_view> reason_of_value(const TargetRecipe& recipe);

}  // namespace loadstone
