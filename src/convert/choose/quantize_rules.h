// Tables of the tensors to quantize, the tensors that share a scale, and the tensors that stay
// plain.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "convert/experts.h"

namespace loadstone {

// Patterns have RE2 syntax and match anywhere in a name.

// The consequence of a rule.
enum class RuleUse : std::uint8_t {
  plain,  // do not quantize
  bnb,    // do not quantize with bitsandbytes' encodings
  // transformers takes the layer's codes for values, except in the style compressed-tensors with an
  // encoding that has WrittenEncoding::decodes_experts.
  joined,
  // transformers takes the layer's codes for values in every style that it reads.
  split,
  // Neither transformers nor loadstone joins these single experts in the style modelopt.
  scattered,
  lost,  // transformers does not find the plain tensor if other tensors of the folder are quantized
};

// A name that should stay plain. Rules for linear layers match the module's name as well as its
// weight's name, because configs list modules.
struct PlainRule {
  // Reason of a rule that ends the search: readers support the names that it matches.
  static constexpr std::string_view is_read = "";

  RuleUse use;
  std::string_view pattern;
  std::string_view reason;
  std::string_view model_types;  // pattern for "model_type" in config.json; empty: any type
  bool is_linear = true;  // true if readers may replace the layer by a quantized linear layer
  // Suggestion if a matching tensor is quantized.
  std::string_view advice = "to keep them unquantized, pass --exclude";
};

// Servers load weights as one matrix, with one scale, if their names agree in the first group and
// differ only in the rest of the pattern.
inline constexpr std::string_view partner_patterns[] = {
    R"(^(.*)\.(?:q|k|v)_proj\.weight$)",
    R"(^(.*)\.(?:wq|wk|wv)\.weight$)",
    R"(^(.*)\.(?:to_q|to_k|to_v)\.weight$)",
    R"(^(.*)\.(?:q_a_proj|kv_a_proj_with_mqa)\.weight$)",
    R"(^(.*\.linear_attn)\.in_proj_(?:qkv|z)\.weight$)",
    R"(^(.*)\.(?:gate|up)_proj(?:\.weight)?$)",
    R"(^(.*)\.(?:w1|w3)\.weight$)",
};

// Rule that cuts a tensor [experts, rows, columns] into the weights of single experts.
struct StackRule {
  std::string_view pattern;          // matches the stack's name; group 1 is the module
  ExpertRole first;                  // role of an expert's first half of rows, or of all rows
  std::optional<ExpertRole> second;  // role of the second half; nullopt: all rows are one weight
};
inline constexpr StackRule stack_rules[] = {
    {R"(^(.*\.experts)\.gate_up_proj(?:\.weight)?$)", ExpertRole::gate, ExpertRole::up},
    {R"(^(.*\.experts)\.(?:down_proj)(?:\.weight)?$)", ExpertRole::down, {}},
    {R"(^(.*\.experts)\.(?:gate_proj)(?:\.weight)?$)", ExpertRole::gate, {}},
    {R"(^(.*\.experts)\.(?:up_proj)(?:\.weight)?$)", ExpertRole::up, {}},
};

// Tensors that may be quantized by default.
inline constexpr std::string_view layer_pattern =
    R"((^|\.)(layers|h|blocks|block|transformer_blocks|single_transformer_blocks)\.\d+\.)";
inline constexpr std::string_view weight_pattern =
    R"(\.weight$|\.experts\.(gate|up|gate_up|down)_proj$)";

[[nodiscard]] std::span<const PlainRule> plain_rules() noexcept;

// Model types with stacks of experts [experts, columns, rows], or with interleaved rows.
inline constexpr std::string_view turned_stack_types = "gpt_oss|llama4|llama4_text";
// Model types whose checkpoints name experts as Mixtral does, and whose block of experts is renamed
// if the experts are one tensor.
inline constexpr std::string_view mixtral_word_types =
    "kimi_linear|mixtral|minimax|minimax_m2|phimoe";
// Model types that also name experts as Mixtral does, but never rename the block of experts.
inline constexpr std::string_view kept_block_types =
    R"(deepseek_v4|lfm2_moe|(minimax_m3_vl|mistral_large4)(_text)?)";

}  // namespace loadstone
