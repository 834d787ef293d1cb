// The caller's patterns and the rules of quantize_rules.h, matched with names of tensors.
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

inline constexpr std::string_view no_encoding = "none";  // of tensors that stay as they are

// Says which tensors may be quantized, and which format each gets. Not thread-safe. The options
// must outlive it.
class Chooser {
 public:
  // One format with its pattern ready. The default's is null.
  struct Format {
    Pattern pattern;
    const Quantization* quantization;
    std::size_t tensors = 0;  // that it is for
    std::size_t made = 0;     // that get it
  };

  // Throws Error "plan.options" for an invalid regular expression.
  Chooser(const QuantizeOptions& options, std::string_view config);

  [[nodiscard]] bool is_excluded(const std::string& name) const;
  [[nodiscard]] bool is_included(const std::string& name) const;
  // Why the tensor stays as it is; nothing where it is quantized.
  [[nodiscard]] std::optional<std::string_view> reason(const TargetRecipe& recipe) const;
  // Return the kind of layer that the tensor's name implies ("embedding"), or that it implies none;
  // nothing for a linear one.
  [[nodiscard]] std::optional<std::string_view> other_layer(const std::string& name) const;
  // Why transformers has no layer of bitsandbytes for the tensor; nothing if it has one. `has`:
  // whether the output has a tensor of this name.
  [[nodiscard]] std::optional<std::string_view> reason_in_bnb(
      const TargetRecipe& recipe, const std::function<bool(const std::string&)>& has) const;
  // Returns the first rule of this use that matches; null without one, or if it is of a kind that
  // is read.
  [[nodiscard]] const PlainRule* first_rule(RuleUse use, const std::string& name) const;
  // Returns the first whose pattern finds the name, or null.
  [[nodiscard]] Format* format_for(const std::string& name);
  // The same, and null for "none": it stays as it is.
  [[nodiscard]] Format* encoding_for(const std::string& name);
  // The same text for all partners of one scale; empty for a tensor that has none.
  [[nodiscard]] std::string group_of(const std::string& name) const;
  // Tells of patterns that find nothing, and of requests that do not hold of the output. `names`:
  // of all candidate tensors. `is_made`: whether a tensor gets the encoding that was asked for.
  void report(const std::vector<std::string>& names,
              const std::function<bool(const std::string&)>& is_made,
              std::vector<Finding>& findings) const;

 private:
  void report_format(const Format& format, bool finds_name, std::vector<Finding>& findings) const;

  // Layers behind the last one of the model are those of the multi-token prediction.
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

// "its numbers are no F32, F16 or BF16", "constant": a value that no encoder takes. Nothing: one
// does.
[[nodiscard]] std::optional<std::string_view> reason_of_value(const TargetRecipe& recipe);

}  // namespace loadstone
