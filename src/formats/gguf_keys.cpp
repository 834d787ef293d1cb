#include "formats/gguf_keys.h"

#include <algorithm>
#include <array>
#include <variant>

namespace loadstone {

namespace {

constexpr MetadataType text_type = MetadataType::string;
constexpr MetadataType list_type = MetadataType::array;

// The types that gguf-py writes and llama.cpp requires.
constexpr auto gguf_keys = std::to_array<GgufKey>({
    {"general.architecture", text_type},
    {"general.type", text_type},
    {"general.name", text_type},
    {"general.author", text_type},
    {"general.version", text_type},
    {"general.organization", text_type},
    {"general.basename", text_type},
    {"general.finetune", text_type},
    {"general.description", text_type},
    {"general.quantized_by", text_type},
    {"general.size_label", text_type},
    {"general.license", text_type},
    {"general.license.name", text_type},
    {"general.license.link", text_type},
    {"general.url", text_type},
    {"general.repo_url", text_type},
    {"general.tags", list_type, text_type},
    {"general.languages", list_type, text_type},
    {"general.alignment", MetadataType::u32},
    {"general.quantization_version", MetadataType::u32},
    {"general.file_type", MetadataType::u32},
    {"tokenizer.ggml.model", text_type},
    {"tokenizer.ggml.pre", text_type},
    {"tokenizer.ggml.tokens", list_type, text_type},
    {"tokenizer.ggml.merges", list_type, text_type},
    {"tokenizer.ggml.scores", list_type, MetadataType::f32},
    {"tokenizer.ggml.token_type", list_type, MetadataType::i32},
    {"tokenizer.ggml.bos_token_id", MetadataType::u32},
    {"tokenizer.ggml.eos_token_id", MetadataType::u32},
    {"tokenizer.ggml.unknown_token_id", MetadataType::u32},
    {"tokenizer.ggml.padding_token_id", MetadataType::u32},
    {"tokenizer.ggml.add_bos_token", MetadataType::boolean},
    {"tokenizer.ggml.add_eos_token", MetadataType::boolean},
    {"tokenizer.ggml.add_space_prefix", MetadataType::boolean},
    {"*.vocab_size", MetadataType::u32},
    {"*.context_length", MetadataType::u32},
    {"*.embedding_length", MetadataType::u32},
    {"*.block_count", MetadataType::u32},
    {"*.feed_forward_length", MetadataType::u32},
    {"*.expert_count", MetadataType::u32},
    {"*.expert_used_count", MetadataType::u32},
    {"*.expert_weights_scale", MetadataType::f32},
    {"*.attention.head_count", MetadataType::u32},
    {"*.attention.head_count_kv", MetadataType::u32},
    {"*.attention.key_length", MetadataType::u32},
    {"*.attention.value_length", MetadataType::u32},
    {"*.attention.sliding_window", MetadataType::u32},
    {"*.attention.layer_norm_epsilon", MetadataType::f32},
    {"*.attention.layer_norm_rms_epsilon", MetadataType::f32},
    {"*.attention.clamp_kqv", MetadataType::f32},
    {"*.attention.max_alibi_bias", MetadataType::f32},
    {"*.attention.scale", MetadataType::f32},
    {"*.rope.dimension_count", MetadataType::u32},
    {"*.rope.freq_base", MetadataType::f32},
    {"*.rope.scale_linear", MetadataType::f32},
    {"*.rope.scaling.factor", MetadataType::f32},
    {"*.rope.scaling.attn_factor", MetadataType::f32},
    {"*.rope.scaling.original_context_length", MetadataType::u32},
    {"*.logit_scale", MetadataType::f32},
    {"*.embedding_scale", MetadataType::f32},
    {"*.residual_scale", MetadataType::f32},
    {"*.attn_logit_softcapping", MetadataType::f32},
    {"*.final_logit_softcapping", MetadataType::f32},
});

}  // namespace

bool GgufKey::fits(const MetadataValue& item) const noexcept {
  if (item.type != type) return false;
  const auto* const array = std::get_if<MetadataArray>(&item.value);
  return array == nullptr || array->item_type() == items;
}

std::string GgufKey::type_text() const {
  if (type != MetadataType::array) return std::string(name(type));
  return "array of " + std::string(name(items));
}

const GgufKey* find_gguf_key(std::string_view key) noexcept {
  // ".block_count" of "llama.block_count"
  const std::string_view ending = key.substr(std::min(key.find('.'), key.size()));
  const auto row = std::ranges::find_if(gguf_keys, [&](const GgufKey& each) {
    return each.is_fixed() ? each.key == key : each.key.substr(1) == ending;
  });
  return row == gguf_keys.end() ? nullptr : &*row;
}

}  // namespace loadstone
