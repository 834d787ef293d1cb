#include "formats/gguf_metadata.h"

#include <fmt/format.h>

#include <span>
#include <vector>

#include "base/text.h"
#include "formats/gguf.h"
#include "formats/metadata.h"

namespace loadstone {

namespace {

constexpr std::uint64_t type_bytes = 4;
constexpr std::uint64_t gguf_length_bytes = 8;  // length field of a string or an array

// Not thread-safe.
class MetadataReader {
 public:
  MetadataReader(GgufCursor& cursor, std::uint64_t bytes_after)
      : cursor_(cursor), reader_(cursor.reader), bytes_after_(bytes_after) {}

  Metadata read(std::uint64_t count) {
    Metadata entries;
    for (std::uint64_t i = 0; i < count; ++i) {
      cursor_.culprit.clear();
      cursor_.field = "n_kv";
      cursor_.reading = fmt::format("metadata entry {} of {}", i + 1, count);
      ahead_ = (count - i - 1) * gguf_entry_bytes_min + bytes_after_;
      std::string key = read_key();
      MetadataValue value = read_value();
      if (key == "general.architecture" && value.type != MetadataType::string) {
        cursor_.refuse({"gg.kv_type", "the architecture is not a string", "general.architecture",
                        type_name(value), "string"});
      }
      if (!entries.emplace(std::move(key), std::move(value)).second) {
        cursor_.refuse(
            {"gg.duplicate", "the key occurs twice", "key", "a second value", "one value"});
      }
    }
    cursor_.culprit.clear();
    return entries;
  }

 private:
  std::string read_key() {
    reader_.set_ahead(ahead_ + gguf_entry_bytes_min - gguf_length_bytes);
    const std::uint64_t length = cursor_.length("key", "gg.string_len");
    cursor_.at = reader_.offset();
    reader_.set_ahead(ahead_ + type_bytes + 1);
    std::string key = reader_.text(length);
    if (!is_metadata_key(key)) {
      cursor_.refuse({"gg.key", key.empty() ? "the key is empty" : "the key is not printable ASCII",
                      "key", "'" + printable_bytes(key) + "'", "printable ASCII"});
    }
    cursor_.culprit = key;
    if (key.size() > gguf_key_bytes_max) {
      cursor_.warnings.add("gg.key", key, "key", "the key is longer than the format allows",
                           bytes_text(key.size()),
                           fmt::format("at most {} bytes", gguf_key_bytes_max));
    }
    return key;
  }

  MetadataType read_type(std::string_view field) {
    const auto id = cursor_.number<std::uint32_t>();
    if (id <= static_cast<std::uint32_t>(MetadataType::f64)) return static_cast<MetadataType>(id);
    cursor_.refuse({"gg.kv_type", "the type of the metadata value is unknown", field,
                    std::to_string(id), "0 to 12"});
  }

  MetadataValue read_value() {
    reader_.set_ahead(ahead_ + 1);
    const MetadataType type = read_type("kv type");
    if (type == MetadataType::string) return {.value = read_string()};
    if (type == MetadataType::array) {
      reader_.set_ahead(ahead_);
      return {.value = read_array(0), .type = type};
    }
    reader_.set_ahead(ahead_);
    cursor_.at = reader_.offset();
    const std::vector<std::byte> bytes = reader_.bytes(byte_count(type));
    if (type == MetadataType::boolean) check_bools(bytes);
    return number_value(type, bytes.data());
  }

  void check_bools(std::span<const std::byte> bools) {
    for (const std::byte each : bools) {
      if (std::to_integer<unsigned>(each) > 1) {
        cursor_.refuse({"gg.bool", "a bool is neither 0 nor 1", "kv bool",
                        std::to_string(std::to_integer<unsigned>(each)), "0 or 1"});
      }
      ++cursor_.at;
    }
  }

  std::string read_string() {
    reader_.set_ahead(ahead_);
    const std::uint64_t length = cursor_.length("kv string", "gg.string_len");
    cursor_.at = reader_.offset();
    std::string text = reader_.text(length);
    if (!is_utf8(text) && utf8_told_for_ != cursor_.culprit) {
      utf8_told_for_ = cursor_.culprit;
      cursor_.warnings.add("gg.utf8", cursor_.culprit, "kv string", "the text is not UTF-8",
                           printable_bytes(text));
    }
    return text;
  }

  // `level` is bounded, so a file cannot make this recurse without limit.
  MetadataArray read_array(unsigned level) {
    const MetadataType type = read_type("kv array");
    MetadataArray array(type);
    if (type == MetadataType::array) check_nesting(level);
    const std::uint64_t each = type == MetadataType::string  ? gguf_length_bytes
                               : type == MetadataType::array ? type_bytes + gguf_length_bytes
                                                             : byte_count(type);
    const std::uint64_t count = cursor_.length("kv array", "gg.array_len", each);
    if (type != MetadataType::string && type != MetadataType::array) {
      cursor_.at = reader_.offset();
      std::vector<std::byte> bytes = reader_.bytes(count * each);
      if (type == MetadataType::boolean) check_bools(bytes);
      array.assign_numbers(std::move(bytes));
      return array;
    }
    const std::uint64_t ahead = ahead_;
    for (std::uint64_t i = 0; i < count; ++i) {
      ahead_ = ahead + (count - i - 1) * each;
      reader_.set_ahead(ahead_);
      if (type == MetadataType::string) {
        array.add_string(read_string());
      } else {
        array.add_array(read_array(level + 1));
      }
    }
    ahead_ = ahead;
    return array;
  }

  void check_nesting(unsigned level) {
    if (level > 0) {
      cursor_.refuse({"gg.nested_array", "arrays are nested deeper than one level", "kv array",
                      "an array of arrays of arrays", "an array of arrays at most"});
    }
    cursor_.warnings.add(
        "gg.nested_array", cursor_.culprit, "kv array",
        "an array of arrays: the format allows it, but most programs do not support it");
  }

  GgufCursor& cursor_;
  HeaderReader& reader_;
  std::uint64_t bytes_after_;
  std::uint64_t ahead_ = 0;    // minimum bytes of header after the current value
  std::string utf8_told_for_;  // last key with this warning; each key gets only one
};

}  // namespace

Metadata read_gguf_metadata(GgufCursor& cursor, std::uint64_t entry_count,
                            std::uint64_t bytes_after) {
  return MetadataReader(cursor, bytes_after).read(entry_count);
}

}  // namespace loadstone
