// Reads GGUF metadata from JSON, for the option --metadata.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "base/json_fields.h"
#include "base/only_errors.h"
#include "base/text.h"
#include "formats/gguf.h"
#include "formats/gguf_keys.h"
#include "formats/metadata.h"

namespace loadstone {

namespace {

constexpr const char* metadata_code = "convert.metadata_json";
constexpr std::string_view format_name = "loadstone-gguf-metadata";
constexpr std::uint64_t format_version = 1;
// Size limit of the JSON. Vocabularies of a few hundred thousand tokens take tens of megabytes.
constexpr std::size_t text_bytes_max = std::size_t{512} << 20;

// Not thread-safe.
class MetadataJson {
 public:
  Metadata read(const JsonDocument& document) {
    const auto root = reader_.object(document.root(), {});
    std::string_view format;
    const bool is_typed = root["format"].get(format) == simdjson::SUCCESS && format == format_name;
    return is_typed ? read_entries(document.root()) : read_plain(root);
  }

 private:
  using Element = JsonReader::Element;

  // Reads {"format": "loadstone-gguf-metadata", "version": 1, "entries": [...]}.
  Metadata read_entries(Element root) {
    JsonObject fields(reader_, root, {});
    std::uint64_t version = 0;
    static_cast<void>(fields.required("format"));
    fields.member("version", version);
    if (version != format_version) {
      fields.refuse("version", "unsupported version", {}, fmt::format("{}", format_version));
    }
    const JsonPlace entries = fields.at("entries");
    Metadata metadata;
    std::size_t index = 0;
    for (const auto entry : reader_.array(fields.required("entries"), entries)) {
      const JsonPlace place = {&entries, {}, index++};
      JsonObject item(reader_, entry, place);
      std::string key;
      item.member("key", key);
      add(key, read_typed(item), item.at("key"), metadata);
    }
    fields.done();
    return metadata;
  }

  // Reads {"general.architecture": "wan", "wan.block_count": 40}.
  Metadata read_plain(const simdjson::dom::object& root) {
    Metadata metadata;
    for (const auto field : root) {
      const JsonPlace place = {nullptr, field.key, 0};
      add(std::string(field.key), read_value(field.key, field.value, place), place, metadata);
    }
    return metadata;
  }

  void add(const std::string& key, MetadataValue item, const JsonPlace& place,
           Metadata& metadata) const {
    if (!is_metadata_key(key) || key.size() > gguf_key_bytes_max) {
      reader_.refuse(
          place, "this is not a valid GGUF key", printable(key),
          fmt::format("at most {} printable ASCII characters without spaces", gguf_key_bytes_max));
    }
    if (!metadata.emplace(key, std::move(item)).second) {
      reader_.refuse(place, "the key occurs twice", printable(key));
    }
  }

  // Reads the fields "type", "items" and "value".
  MetadataValue read_typed(JsonObject& fields) {
    MetadataType type{};
    MetadataType items{};
    fields.member("type", type);
    if (fields.optional("items", items) != (type == MetadataType::array)) {
      fields.refuse("items",
                    "the field with the type of the items is required for an array, and not "
                    "allowed for other types");
    }
    const JsonPlace place = fields.at("value");
    const Element value = fields.required("value");
    MetadataValue item = type == MetadataType::array ? read_array(items, value, place)
                                                     : read_item(type, value, place);
    fields.done();
    return item;
  }

  // Reads a value without a type: known keys determine it, otherwise the value.
  MetadataValue read_value(std::string_view key, Element value, const JsonPlace& place) {
    if (value.is_object()) {
      if (value["type"].error() != simdjson::SUCCESS) refuse_value(value, place);
      JsonObject fields(reader_, value, place);
      return read_typed(fields);
    }
    const GgufKey* const known = find_gguf_key(key);
    if (known != nullptr && known->type == MetadataType::array) {
      return read_array(known->items, value, place);
    }
    if (value.is_array()) {
      const bool is_known = known != nullptr && !known->is_fixed();
      return read_array(is_known ? known->type : item_type(reader_.array(value, place), place),
                        value, place);
    }
    return read_item(known != nullptr ? known->type : type_of(std::array{value}, place), value,
                     place);
  }

  // Returns the type of all items of an array.
  MetadataType item_type(const simdjson::dom::array& items, const JsonPlace& place) const {
    if (items.begin() == items.end()) {
      reader_.refuse(place, "an empty array needs a type", "[]",
                     R"({"type": "array", "items": "string", "value": []})");
    }
    return type_of(items, place);
  }

  // Returns the type of values that have the same kind: the narrowest of u32, i32, u64 and i64 for
  // integers.
  template <typename Values>
  MetadataType type_of(const Values& values, const JsonPlace& place) const {
    std::optional<MetadataType> first;
    std::int64_t lowest = 0;
    std::uint64_t highest = 0;
    for (const Element value : values) {
      const MetadataType kind = kind_of(value, place);
      if (first.value_or(kind) != kind) {
        reader_.refuse(place, "the items of an array must have one type", simdjson::minify(value),
                       fmt::format("{}, like the first item",
                                   *first == MetadataType::i64 ? "an integer" : name(*first)));
      }
      first = kind;
      std::int64_t below = 0;
      std::uint64_t above = 0;
      if (value.get(below) == simdjson::SUCCESS) lowest = std::min(lowest, below);
      if (value.get(above) == simdjson::SUCCESS) highest = std::max(highest, above);
    }
    if (*first != MetadataType::i64) return *first;
    if (lowest == 0) return highest <= UINT32_MAX ? MetadataType::u32 : MetadataType::u64;
    const bool is_small = lowest >= INT32_MIN && highest <= INT32_MAX;
    return is_small ? MetadataType::i32 : MetadataType::i64;
  }

  // Returns i64 for all integers.
  MetadataType kind_of(Element value, const JsonPlace& place) const {
    switch (value.type()) {
      case simdjson::dom::element_type::STRING:
        return MetadataType::string;
      case simdjson::dom::element_type::BOOL:
        return MetadataType::boolean;
      case simdjson::dom::element_type::DOUBLE:
        return MetadataType::f32;
      case simdjson::dom::element_type::INT64:
      case simdjson::dom::element_type::UINT64:
        return MetadataType::i64;
      default:
        refuse_value(value, place);
    }
  }

  [[noreturn]] void refuse_value(Element value, const JsonPlace& place) const {
    reader_.refuse(place, "GGUF has no type for this value",
                   printable(std::string(simdjson::minify(value)), 80),
                   R"(a string, a number, true, false, an array of these, or a value with its )"
                   R"(type: {"type": "u32", "value": 7})");
  }

  MetadataValue read_array(MetadataType type, Element value, const JsonPlace& place) {
    if (type == MetadataType::array)
      reader_.refuse(place, "loadstone cannot write arrays of arrays");
    MetadataArray array(type);
    std::string numbers;
    std::size_t index = 0;
    for (const auto each : reader_.array(value, place)) {
      const JsonPlace at = {&place, {}, index++};
      const MetadataValue item = read_item(type, each, at);
      if (const auto* const text = std::get_if<std::string>(&item.value)) {
        array.add_string(*text);
      } else {
        static_cast<void>(append_number(item, numbers));  // fits, as read_item() has checked
      }
    }
    std::vector<std::byte> bytes(numbers.size());
    if (!bytes.empty()) std::memcpy(bytes.data(), numbers.data(), bytes.size());
    if (type != MetadataType::string) array.assign_numbers(std::move(bytes));
    return {.value = std::move(array), .type = MetadataType::array};
  }

  MetadataValue read_item(MetadataType type, Element value, const JsonPlace& place) {
    MetadataValue item = {.value = std::string(), .type = type};
    switch (type) {
      case MetadataType::string:
        item.value = std::string(reader_.string(value, place));
        return item;
      case MetadataType::boolean:
        item.value = reader_.boolean(value, place);
        return item;
      case MetadataType::f32:
      case MetadataType::f64:
        item.value = floating(value, place);
        break;
      case MetadataType::u8:
      case MetadataType::u16:
      case MetadataType::u32:
      case MetadataType::u64:
        item.value = reader_.unsigned_number(value, place);
        break;
      case MetadataType::i8:
      case MetadataType::i16:
      case MetadataType::i32:
      case MetadataType::i64:
        item.value = reader_.signed_number(value, place);
        break;
      case MetadataType::array:
        reader_.refuse(place, "loadstone cannot write arrays of arrays");
    }
    std::string bytes;
    if (!append_number(item, bytes)) {
      reader_.refuse(place, fmt::format("the number does not fit in {}", name(type)));
    }
    // Rounds an f32 value as a GGUF file would.
    return number_value(type, reinterpret_cast<const std::byte*>(bytes.data()));
  }

  double floating(Element value, const JsonPlace& place) const {
    double number = 0;
    if (value.get(number) == simdjson::SUCCESS) return number;
    const std::string_view text = reader_.string(value, place);
    if (text == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (text == "inf") return std::numeric_limits<double>::infinity();
    if (text == "-inf") return -std::numeric_limits<double>::infinity();
    reader_.refuse(place, "the value is not a number", printable(text),
                   "a number, \"nan\", \"inf\" or \"-inf\"");
  }

  JsonReader reader_ = JsonReader(metadata_code);
};

}  // namespace

Metadata metadata_from_json(std::string_view text) {
  return only_errors(
      [&] { return MetadataJson().read(JsonDocument(text, metadata_code, text_bytes_max)); });
}

}  // namespace loadstone
