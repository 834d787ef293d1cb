// Which tensors are quantized, which of them share a scale, and which stay as they are: as data,
// to be read and extended.
#pragma once

#include <optional>
#include <span>
#include <string_view>

#include "convert/expert_names.h"

namespace loadstone {

// Patterns are RE2 syntax and are looked for anywhere in a name.

// A name that says: do not quantize. Rules for linear layers find the module as well as its weight:
// configs that list modules contain them.
struct PlainRule {
  // The reason of a rule for names that no later rule is about.
  static constexpr std::string_view is_read = "";

  std::string_view pattern;
  std::string_view reason;
  std::string_view model_types;  // pattern of config.json's "model_type"; empty: any
  bool is_linear = true;         // a layer that readers of quantized linear layers may replace
  std::string_view advice = "--exclude leaves them as numbers";  // for a quantized one
};

// Weights whose names agree in what the first group finds, and in nothing but the rest of the
// pattern, are loaded as one matrix by servers, and so have one scale.
struct PartnerRule {
  std::string_view pattern;
};

// A tensor [experts, rows, columns] as the weights of single experts.
struct StackRule {
  std::string_view pattern;          // group 1: the module of the experts
  ExpertRole first;                  // what the rows of an expert are, in equal shares
  std::optional<ExpertRole> second;  // none: all rows are one weight
};

// What may be quantized at all.
inline constexpr std::string_view layer_pattern =
    R"((^|\.)(layers|h|blocks|block|transformer_blocks|single_transformer_blocks)\.\d+\.)";
inline constexpr std::string_view weight_pattern =
    R"(\.weight$|\.experts\.(gate|up|gate_up|down)_proj$)";

[[nodiscard]] std::span<const PlainRule> plain_rules() noexcept;
// More of them, for encodings of bitsandbytes.
[[nodiscard]] std::span<const PlainRule> bnb_plain_rules() noexcept;
// Layers whose codes transformers takes for numbers: unless WrittenEncoding::decodes_experts, and
// in any style it reads.
[[nodiscard]] std::span<const PlainRule> joined_rules() noexcept;
[[nodiscard]] std::span<const PlainRule> split_rules() noexcept;
// Plain tensors that transformers does not find if anything else in the folder is quantized.
[[nodiscard]] std::span<const PlainRule> lost_rules() noexcept;
[[nodiscard]] std::span<const PartnerRule> partner_rules() noexcept;
[[nodiscard]] std::span<const StackRule> stack_rules() noexcept;
// Model types whose stacks of experts are kept [experts, columns, rows], or with rows interleaved.
[[nodiscard]] std::string_view turned_stack_types() noexcept;
// Model types that are published with Mixtral's words for experts, and those of them whose block
// of experts has one name, whether the experts are one tensor or not.
[[nodiscard]] std::string_view mixtral_word_types() noexcept;
[[nodiscard]] std::string_view kept_block_types() noexcept;

}  // namespace loadstone
