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

// `Number`: the type in the file. `Held`: the type in the variant of MetadataValue.
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

// Properties of a metadata type. The functions are null for strings and arrays.
struct TypeRow {
  std::string_view name;
  std::size_t bytes = 0;  // 0: the length varies
  decltype(MetadataValue::value) (*read)(const std::byte* bytes) = nullptr;
  bool (*append)(const MetadataValue& item, std::string& bytes) = nullptr;
};

template <typename Number, typename Held>
constexpr TypeRow row(std::string_view name) {
  return {name, sizeof(Number),
          [](const std::byte* bytes) -> decltype(MetadataValue::value) {
            return static_cast<Held>(number_from<Number>(bytes));
          },
          append_held<Number, Held>};
}

// In the order of MetadataType.
constexpr auto type_rows = std::to_array<TypeRow>({
    row<std::uint8_t, std::uint64_t>("u8"),
    row<std::int8_t, std::int64_t>("i8"),
    row<std::uint16_t, std::uint64_t>("u16"),
    row<std::int16_t, std::int64_t>("i16"),
    row<std::uint32_t, std::uint64_t>("u32"),
    row<std::int32_t, std::int64_t>("i32"),
    row<float, double>("f32"),
    row<std::uint8_t, bool>("bool"),
    {"string"},
    {"array"},
    row<std::uint64_t, std::uint64_t>("u64"),
    row<std::int64_t, std::int64_t>("i64"),
    row<double, double>("f64"),
});

const TypeRow& row_of(MetadataType type) noexcept {
  return type_rows[static_cast<std::size_t>(type)];
}

}  // namespace

std::string_view name(MetadataType type) noexcept {
  const auto index = static_cast<std::size_t>(type);
  return index < type_rows.size() ? type_rows[index].name : std::string_view();
}

std::size_t byte_count(MetadataType type) noexcept { return row_of(type).bytes; }

MetadataValue number_value(MetadataType type, const std::byte* bytes) {
  const auto read = row_of(type).read;
  return {.value = read != nullptr ? read(bytes) : false, .type = type};
}

bool append_number(const MetadataValue& value, std::string& bytes) {
  const auto append = row_of(value.type).append;
  return append != nullptr && append(value, bytes);
}

bool is_metadata_key(std::string_view key) noexcept {
  return !key.empty() &&
         std::ranges::all_of(key, [](unsigned char byte) { return byte > 0x20 && byte < 0x7f; });
}

void write_json(JsonWriter& json, const MetadataValue& item) {
  if (const auto* array = std::get_if<MetadataArray>(&item.value)) {
    json.begin_array();
    for (const MetadataValue& each : *array) write_json(json, each);  // nested one level at most
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
