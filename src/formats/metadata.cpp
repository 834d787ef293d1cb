#include "formats/metadata.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstring>
#include <type_traits>

#include "base/only_errors.h"

namespace loadstone {

namespace {

struct TypeRow {
  std::string_view name;
  std::size_t bytes;  // 0 where the length varies
};

// In the order of MetadataType.
constexpr auto type_rows = std::to_array<TypeRow>({{"u8", 1},
                                                   {"i8", 1},
                                                   {"u16", 2},
                                                   {"i16", 2},
                                                   {"u32", 4},
                                                   {"i32", 4},
                                                   {"f32", 4},
                                                   {"bool", 1},
                                                   {"string", 0},
                                                   {"array", 0},
                                                   {"u64", 8},
                                                   {"i64", 8},
                                                   {"f64", 8}});

template <typename Number>
Number number_from(const std::byte* bytes) noexcept {
  Number number;
  std::memcpy(&number, bytes, sizeof number);
  return number;
}

template <typename Number>
bool append_as(const Number& number, std::string& bytes) {
  const std::size_t at = bytes.size();
  bytes.resize(at + sizeof number);
  std::memcpy(bytes.data() + at, &number, sizeof number);
  return true;
}

// `Held` is what the variant holds for numbers of this type.
template <typename Number, typename Held>
bool append_held(const MetadataValue& item, std::string& bytes) {
  const auto* const held = std::get_if<Held>(&item.value);
  if (held == nullptr) return false;
  if constexpr (std::integral<Held> && !std::same_as<Held, bool>) {
    if (!std::in_range<Number>(*held)) return false;
  }
  if constexpr (std::floating_point<Number>) {
    if (std::isfinite(*held) && !std::isfinite(static_cast<Number>(*held))) return false;
  }
  return append_as(static_cast<Number>(*held), bytes);
}

}  // namespace

std::string_view name(MetadataType type) noexcept {
  const auto index = static_cast<std::size_t>(type);
  return index < type_rows.size() ? type_rows[index].name : std::string_view();
}

std::size_t byte_count(MetadataType type) noexcept {
  return type_rows[static_cast<std::size_t>(type)].bytes;
}

MetadataValue number_value(MetadataType type, const std::byte* bytes) {
  MetadataValue item{.value = false, .type = type};
  switch (type) {
    case MetadataType::u8:
      item.value = std::uint64_t{number_from<std::uint8_t>(bytes)};
      break;
    case MetadataType::i8:
      item.value = std::int64_t{number_from<std::int8_t>(bytes)};
      break;
    case MetadataType::u16:
      item.value = std::uint64_t{number_from<std::uint16_t>(bytes)};
      break;
    case MetadataType::i16:
      item.value = std::int64_t{number_from<std::int16_t>(bytes)};
      break;
    case MetadataType::u32:
      item.value = std::uint64_t{number_from<std::uint32_t>(bytes)};
      break;
    case MetadataType::i32:
      item.value = std::int64_t{number_from<std::int32_t>(bytes)};
      break;
    case MetadataType::f32:
      item.value = double{number_from<float>(bytes)};
      break;
    case MetadataType::u64:
      item.value = number_from<std::uint64_t>(bytes);
      break;
    case MetadataType::i64:
      item.value = number_from<std::int64_t>(bytes);
      break;
    case MetadataType::f64:
      item.value = number_from<double>(bytes);
      break;
    case MetadataType::boolean:
      item.value = number_from<std::uint8_t>(bytes) != 0;
      break;
    case MetadataType::string:
    case MetadataType::array:
      break;  // no numbers
  }
  return item;
}

bool append_number(const MetadataValue& value, std::string& bytes) {
  switch (value.type) {
    case MetadataType::u8:
      return append_held<std::uint8_t, std::uint64_t>(value, bytes);
    case MetadataType::i8:
      return append_held<std::int8_t, std::int64_t>(value, bytes);
    case MetadataType::u16:
      return append_held<std::uint16_t, std::uint64_t>(value, bytes);
    case MetadataType::i16:
      return append_held<std::int16_t, std::int64_t>(value, bytes);
    case MetadataType::u32:
      return append_held<std::uint32_t, std::uint64_t>(value, bytes);
    case MetadataType::i32:
      return append_held<std::int32_t, std::int64_t>(value, bytes);
    case MetadataType::f32:
      return append_held<float, double>(value, bytes);
    case MetadataType::u64:
      return append_held<std::uint64_t, std::uint64_t>(value, bytes);
    case MetadataType::i64:
      return append_held<std::int64_t, std::int64_t>(value, bytes);
    case MetadataType::f64:
      return append_held<double, double>(value, bytes);
    case MetadataType::boolean:
      return append_held<std::uint8_t, bool>(value, bytes);
    case MetadataType::string:
    case MetadataType::array:
      break;  // no numbers
  }
  return false;
}

bool is_metadata_key(std::string_view key) noexcept {
  return !key.empty() &&
         std::ranges::all_of(key, [](unsigned char byte) { return byte > 0x20 && byte < 0x7f; });
}

void write_json(JsonWriter& json, const MetadataValue& item) {
  if (const auto* array = std::get_if<MetadataArray>(&item.value)) {
    json.begin_array();
    for (const MetadataValue& each : *array) write_json(json, each);  // one level at most: gguf.h
    json.end_array();
    return;
  }
  std::visit(
      [&](const auto& value) {
        if constexpr (!std::is_same_v<std::decay_t<decltype(value)>, MetadataArray>) {
          json.value(value);
        }
      },
      item.value);
}

std::string json_of(const MetadataValue& item) {
  JsonWriter json;
  write_json(json, item);
  return json.take();
}

std::optional<std::string> text_of(const MetadataValue& item) {
  struct ToText {
    MetadataType type;

    std::optional<std::string> operator()(const std::string& text) const { return text; }
    std::optional<std::string> operator()(bool truth) const { return truth ? "true" : "false"; }
    std::optional<std::string> operator()(std::int64_t number) const {
      return fmt::format("{}", number);
    }
    std::optional<std::string> operator()(std::uint64_t number) const {
      return fmt::format("{}", number);
    }
    std::optional<std::string> operator()(double number) const {
      return type == MetadataType::f32 ? fmt::format("{}", static_cast<float>(number))
                                       : fmt::format("{}", number);
    }
    std::optional<std::string> operator()(const MetadataArray&) const { return std::nullopt; }
  };
  return std::visit(ToText{item.type}, item.value);
}

std::size_t MetadataArray::size() const noexcept {
  if (item_type_ == MetadataType::string) return string_ends_.size();
  if (item_type_ == MetadataType::array) return arrays_.size();
  return bytes_.size() / byte_count(item_type_);
}

MetadataValue MetadataArray::operator[](std::size_t index) const {
  return only_errors([&]() -> MetadataValue {
    if (item_type_ == MetadataType::array) {
      return {.value = arrays_[index], .type = MetadataType::array};
    }
    if (item_type_ != MetadataType::string) {
      return number_value(item_type_, bytes_.data() + index * byte_count(item_type_));
    }
    const std::uint64_t begin = index == 0 ? 0 : string_ends_[index - 1];
    const auto* text = reinterpret_cast<const char*>(bytes_.data());
    return {.value = std::string(text + begin, text + string_ends_[index])};
  });
}

void MetadataArray::add_string(std::string_view text) {
  only_errors([&] {
    const auto* bytes = reinterpret_cast<const std::byte*>(text.data());
    bytes_.insert(bytes_.end(), bytes, bytes + text.size());
    string_ends_.push_back(bytes_.size());
  });
}

MetadataValue MetadataArray::Iterator::operator*() const { return (*array_)[index_]; }

std::string type_name(const MetadataValue& value) {
  return only_errors([&]() -> std::string {
    const auto* array = std::get_if<MetadataArray>(&value.value);
    if (array == nullptr) return std::string(name(value.type));
    return "array of " + std::string(name(array->item_type()));
  });
}

}  // namespace loadstone
