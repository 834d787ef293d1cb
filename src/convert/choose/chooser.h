// Matches the caller's patterns and the rules of quantize_rules.h with names of tensors.
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
    std::size_t tensors = 0;  // that match it
    std::size_t made = 0;     // that get it
  };

  // Throws Error "plan.options" for an invalid regular expression.
  Chooser(const QuantizeOptions& options, std::string_view config);

  [[nodiscard]] bool is_excluded(const std::string& name) const;
  [[nodiscard]] bool is_included(const std::string& name) const;
  // Returns the reason to keep the tensor unchanged; nullopt if it is quantized.
  [[nodiscard]] std::optional<std::string_view> reason(const TargetRecipe& recipe) const;
  // Returns the kind of layer that the name implies ("embedding", or none); nullopt for a linear
  // layer.
  [[nodiscard]] std::optional<std::string_view> other_layer(const std::string& name) const;
  // Returns the reason why transformers has no bitsandbytes layer for the tensor; nullopt if it has
  // one. `has`: returns true if the output has a tensor of this name.
  [[nodiscard]] std::optional<std::string_view> reason_in_bnb(
      const TargetRecipe& recipe, const std::function<bool(const std::string&)>& has) const;
  // Returns the first rule for this use that matches; null if no rule matches, or if it is of a
  // kind that readers support.
  [[nodiscard]] const PlainRule* first_rule(RuleUse use, const std::string& name) const;
  // Returns the first format whose pattern matches the name, or null.
  [[nodiscard]] Format* format_for(const std::string& name);
  // The same, but null for "none".
  [[nodiscard]] Format* encoding_for(const std::string& name);
  // Returns the same text for all tensors that share a scale; empty for a tensor with its own.
  [[nodiscard]] std::string group_of(const std::string& name) const;
  // Reports patterns without a match, and requests that the output does not fulfil. `names`: all
  // candidate tensors. `is_made`: returns true if a tensor gets the requested encoding.
  void report(const std::vector<std::string>& names,
              const std::function<bool(const std::string&)>& is_made,
              std::vector<Finding>& findings) const;

 private:
  void report_format(const Format& format, bool finds_name, std::vector<Finding>& findings) const;

  // Layers after the model's last one belong to multi-token prediction.
  [[nodiscard]] bool is_beyond(const std::string& name) const;

  Pattern layer_;
  Pattern weight_;
  Pattern layer_number_;
  std::optional<std::uint64_t> layers_;
  std::vector<Format> formats_;
  std::vector<Pattern> include_;
  std::vector<Pattern> exclude_;
  std::vector<std::pair<Pattern, const PlainRule*>> rules_;  // for the model's type
  std::vector<Pattern> partners_;
};

// Returns the reason why no encoder accepts the value ("its numbers are no F32, F16 or BF16",
// "constant"), or nullopt.
[[nodiscard]] std::optional<std::string_view> reason_of_value(const TargetRecipe& recipe);

}  // namespace loadstone
