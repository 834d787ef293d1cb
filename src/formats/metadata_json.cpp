// Reads GGUF metadata from JSON, for the option --metadata.
#include <fmt/format.h>

#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "base/json_fields.h"
#include "base/only_errors.h"
#include "base/text.h"
#include "formats/gguf.h"
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
    JsonObject fields(reader_, document.root(), {});
    std::string format;
    std::uint64_t version = 0;
    fields.member("format", format);
    if (format != format_name) {
      fields.refuse("format", "this is not a metadata file", {}, std::string(format_name));
    }
    fields.member("version", version);
    if (version != format_version) {
      fields.refuse("version", "unsupported version", {}, fmt::format("{}", format_version));
    }
    const JsonPlace entries = fields.at("entries");
    Metadata metadata;
    std::size_t index = 0;
    for (const auto entry : reader_.array(fields.required("entries"), entries)) {
      read_entry(entry, {&entries, {}, index++}, metadata);
    }
    fields.done();
    return metadata;
  }

 private:
  using Element = JsonReader::Element;

  void read_entry(Element entry, const JsonPlace& place, Metadata& metadata) {
    JsonObject fields(reader_, entry, place);
    std::string key;
    fields.member("key", key);
    if (!is_metadata_key(key) || key.size() > gguf_key_bytes_max) {
      fields.refuse(
          "key", "this is not a valid GGUF key", printable(key),
          fmt::format("at most {} printable ASCII characters without spaces", gguf_key_bytes_max));
    }
    MetadataType type{};
    MetadataType items{};
    fields.member("type", type);
    if (fields.optional("items", items) != (type == MetadataType::array)) {
      fields.refuse("items",
                    "the field with the type of the items is required for an array, and not "
                    "allowed for other types");
    }
    const JsonPlace value_place = fields.at("value");
    const Element value = fields.required("value");
    MetadataValue item = type == MetadataType::array ? read_array(items, value, value_place)
                                                     : read_item(type, value, value_place);
    fields.done();
    if (!metadata.emplace(key, std::move(item)).second) {
      fields.refuse("key", "the key occurs twice", printable(key));
    }
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
