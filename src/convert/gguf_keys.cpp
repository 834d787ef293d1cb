#include "convert/gguf_keys.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <optional>
#include <utility>
#include <variant>

#include "base/named.h"
#include "base/words.h"
#include "formats/metadata.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

struct KeyType {
  std::string_view key;
  MetadataType type;
  MetadataType items = MetadataType::u8;  // of an array
};

constexpr MetadataType text_type = MetadataType::string;
constexpr MetadataType list_type = MetadataType::array;

// As gguf-py writes them and llama.cpp asks for them.
constexpr auto key_types = std::to_array<KeyType>({
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
});

std::string type_text(const KeyType& row) {
  if (row.type != MetadataType::array) return std::string(name(row.type));
  return "array of " + std::string(name(row.items));
}

bool has_type(const MetadataValue& item, const KeyType& row) {
  if (item.type != row.type) return false;
  const auto* const array = std::get_if<MetadataArray>(&item.value);
  return array == nullptr || array->item_type() == row.items;
}

// Nothing for a key whose type the format leaves open, or whose values are arrays.
std::optional<MetadataType> fixed_type(std::string_view key) {
  const auto row = std::ranges::find(key_types, key, &KeyType::key);
  if (row == key_types.end() || row->type == list_type) return std::nullopt;
  return row->type;
}

std::map<std::string_view, MetadataType> types_of(std::string_view entries) {
  std::map<std::string_view, MetadataType> types;
  for_each_word(entries, [&](std::string_view entry) {
    const std::size_t equals = entry.rfind('=');
    if (equals == std::string_view::npos) return;
    const auto type = from_name<MetadataType>(entry.substr(equals + 1));
    if (type) types.emplace(entry.substr(0, equals), *type);
  });
  return types;
}

template <typename Number>
bool parse(std::string_view digits, MetadataValue& item) {
  Number number = 0;
  const char* const end = digits.data() + digits.size();
  const auto [stop, problem] = std::from_chars(digits.data(), end, number);
  item.value = number;
  return problem == std::errc() && stop == end;
}

// Parse what text_of() writes; nothing for text that the type does not have.
std::optional<MetadataValue> parsed(MetadataType type, std::string_view digits) {
  MetadataValue item = {.value = digits == "true", .type = type};
  const std::string_view kind = name(type);  // "u8", "i64"
  const bool is_value = type == MetadataType::boolean ? digits == "true" || digits == "false"
                        : type == MetadataType::f32   ? parse<float>(digits, item)
                        : type == MetadataType::f64   ? parse<double>(digits, item)
                        : kind.starts_with('u')
                            ? parse<std::uint64_t>(digits, item)
                            : kind.starts_with('i') && parse<std::int64_t>(digits, item);
  std::string bytes;
  if (!is_value || !append_number(item, bytes)) return std::nullopt;
  return number_value(type, reinterpret_cast<const std::byte*>(bytes.data()));
}

}  // namespace

std::string types_text(const Metadata& source, const Metadata& texts) {
  std::string types;
  for (const auto& [key, item] : source) {
    const bool is_text = item.type == MetadataType::string || item.type == MetadataType::array;
    if (is_text || !is_metadata_key(key) || fixed_type(key) == item.type || !texts.contains(key)) {
      continue;
    }
    types += fmt::format("{}{}={}", types.empty() ? "" : " ", key, name(item.type));
  }
  return types;
}

std::vector<std::string> restore_types(std::string_view types, Metadata& metadata) {
  const auto kept = types_of(types);
  std::vector<std::string> failed;
  for (auto& [key, item] : metadata) {
    const auto* const digits = std::get_if<std::string>(&item.value);
    const auto found = kept.find(key);
    const auto type = found != kept.end() ? std::optional(found->second) : fixed_type(key);
    if (digits == nullptr || !type || *type == MetadataType::string) continue;
    if (auto value = parsed(*type, *digits)) {
      item = *std::move(value);
    } else {
      failed.push_back(key);
    }
  }
  return failed;
}

void check_key_types(const Metadata& given) {
  for (const KeyType& row : key_types) {
    const auto found = given.find(std::string(row.key));
    if (found == given.end() || has_type(found->second, row)) continue;
    throw Error("plan.options", "the key has another type in GGUF",
                {.tensor = found->first,
                 .field = "metadata",
                 .found = type_name(found->second),
                 .expected = type_text(row)});
  }
}

}  // namespace loadstone
