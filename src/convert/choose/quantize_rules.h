// Which tensors are quantized, which of them share a scale, and which stay as they are: as data,
// to be read and extended.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "convert/experts.h"

namespace loadstone {

// Patterns are RE2 syntax and are looked for anywhere in a name.

// The consequence of a rule.
enum class RuleUse : std::uint8_t {
  plain,  // do not quantize
  bnb,    // nor to encodings of bitsandbytes
  // transformers takes the layer's codes for numbers: unless WrittenEncoding::decodes_experts, and
  // in any style it reads.
  joined,
  split,
  lost,  // transformers does not find the plain tensor if anything else in the folder is quantized
};

// A name that should stay plain. Rules for linear layers find the module as well as its weight:
// configs that list modules contain them.
struct PlainRule {
  // The reason of a rule for names that no later rule is about.
  static constexpr std::string_view is_read = "";

  RuleUse use;
  std::string_view pattern;
  std::string_view reason;
  std::string_view model_types;  // pattern of config.json's "model_type"; empty: any
  bool is_linear = true;         // a layer that readers of quantized linear layers may replace
  std::string_view advice = "--exclude leaves them as numbers";  // for a quantized one
};

// Weights whose names agree in what the first group finds, and in nothing but the rest of the
// pattern, are loaded as one matrix by servers, and so have one scale.
inline constexpr std::string_view partner_patterns[] = {
    R"(^(.*)\.(?:q|k|v)_proj\.weight$)",
    R"(^(.*)\.(?:wq|wk|wv)\.weight$)",
    R"(^(.*)\.(?:to_q|to_k|to_v)\.weight$)",
    R"(^(.*)\.(?:q_a_proj|kv_a_proj_with_mqa)\.weight$)",
    R"(^(.*\.linear_attn)\.in_proj_(?:qkv|z)\.weight$)",
    R"(^(.*)\.(?:gate|up)_proj(?:\.weight)?$)",
    R"(^(.*)\.(?:w1|w3)\.weight$)",
};

// A tensor [experts, rows, columns] as the weights of single experts.
struct StackRule {
  std::string_view pattern;          // group 1: the module of the experts
  ExpertRole first;                  // what the rows of an expert are, in equal shares
  std::optional<ExpertRole> second;  // none: all rows are one weight
};
inline constexpr StackRule stack_rules[] = {
    {R"(^(.*\.experts)\.gate_up_proj(?:\.weight)?$)", ExpertRole::gate, ExpertRole::up},
    {R"(^(.*\.experts)\.(?:down_proj)(?:\.weight)?$)", ExpertRole::down, {}},
    {R"(^(.*\.experts)\.(?:gate_proj)(?:\.weight)?$)", ExpertRole::gate, {}},
    {R"(^(.*\.experts)\.(?:up_proj)(?:\.weight)?$)", ExpertRole::up, {}},
};

// What may be quantized at all.
inline constexpr std::string_view layer_pattern =
    R"((^|\.)(layers|h|blocks|block|transformer_blocks|single_transformer_blocks)\.\d+\.)";
inline constexpr std::string_view weight_pattern =
    R"(\.weight$|\.experts\.(gate|up|gate_up|down)_proj$)";

[[nodiscard]] std::span<const PlainRule> plain_rules() noexcept;

// Model types whose stacks of experts are kept [experts, columns, rows], or with rows interleaved.
inline constexpr std::string_view turned_stack_types = "gpt_oss|llama4|llama4_text";
// Model types that are published with Mixtral's words for experts, and those of them whose block
// of experts has one name, whether the experts are one tensor or not.
inline constexpr std::string_view mixtral_word_types =
    "kimi_linear|mixtral|minimax|minimax_m2|phimoe";
inline constexpr std::string_view kept_block_types =
    R"(deepseek_v4|lfm2_moe|(minimax_m3_vl|mistral_large4)(_text)?)";

}  // namespace loadstone
