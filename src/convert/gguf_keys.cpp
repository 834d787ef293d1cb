#include "convert/gguf_keys.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <variant>

#include "loadstone/error.h"

namespace loadstone {

namespace {

struct KeyType {
  std::string_view key;
  MetadataType type;
  MetadataType items = MetadataType::u8;  // of an array
};

constexpr MetadataType text = MetadataType::string;
constexpr MetadataType list = MetadataType::array;

// As gguf-py writes them and llama.cpp asks for them.
constexpr auto key_types = std::to_array<KeyType>({
    {"general.architecture", text},
    {"general.type", text},
    {"general.name", text},
    {"general.author", text},
    {"general.version", text},
    {"general.organization", text},
    {"general.basename", text},
    {"general.finetune", text},
    {"general.description", text},
    {"general.quantized_by", text},
    {"general.size_label", text},
    {"general.license", text},
    {"general.license.name", text},
    {"general.license.link", text},
    {"general.url", text},
    {"general.repo_url", text},
    {"general.tags", list, text},
    {"general.languages", list, text},
    {"general.quantization_version", MetadataType::u32},
    {"general.file_type", MetadataType::u32},
    {"tokenizer.ggml.model", text},
    {"tokenizer.ggml.pre", text},
    {"tokenizer.ggml.tokens", list, text},
    {"tokenizer.ggml.merges", list, text},
    {"tokenizer.ggml.scores", list, MetadataType::f32},
    {"tokenizer.ggml.token_type", list, MetadataType::i32},
    {"tokenizer.ggml.bos_token_id", MetadataType::u32},
    {"tokenizer.ggml.eos_token_id", MetadataType::u32},
    {"tokenizer.ggml.unknown_token_id", MetadataType::u32},
    {"tokenizer.ggml.padding_token_id", MetadataType::u32},
    {"tokenizer.ggml.add_bos_token", MetadataType::boolean},
    {"tokenizer.ggml.add_eos_token", MetadataType::boolean},
    {"tokenizer.ggml.add_space_prefix", MetadataType::boolean},
});

std::string text_of(const KeyType& row) {
  if (row.type != MetadataType::array) return std::string(name(row.type));
  return "array of " + std::string(name(row.items));
}

bool has_type(const MetadataValue& item, const KeyType& row) {
  if (item.type != row.type) return false;
  const auto* const array = std::get_if<MetadataArray>(&item.value);
  return array == nullptr || array->item_type() == row.items;
}

}  // namespace

void check_key_types(const Metadata& given) {
  for (const KeyType& row : key_types) {
    const auto found = given.find(std::string(row.key));
    if (found == given.end() || has_type(found->second, row)) continue;
    throw Error("plan.options", "the key has another type in GGUF",
                {.tensor = found->first,
                 .field = "metadata",
                 .found = type_name(found->second),
                 .expected = text_of(row)});
  }
}

}  // namespace loadstone
