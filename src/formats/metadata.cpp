#include "formats/metadata.h"

#include <array>
#include <cstring>

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
Number number_at(const std::byte* bytes) noexcept {
  Number number;
  std::memcpy(&number, bytes, sizeof number);
  return number;
}

}  // namespace

std::string_view name(MetadataType type) noexcept {
  return type_rows[static_cast<std::size_t>(type)].name;
}

std::size_t byte_count(MetadataType type) noexcept {
  return type_rows[static_cast<std::size_t>(type)].bytes;
}

MetadataValue number_value(MetadataType type, const std::byte* bytes) {
  MetadataValue item{.value = false, .type = type};
  switch (type) {
    case MetadataType::u8:
      item.value = std::uint64_t{number_at<std::uint8_t>(bytes)};
      break;
    case MetadataType::i8:
      item.value = std::int64_t{number_at<std::int8_t>(bytes)};
      break;
    case MetadataType::u16:
      item.value = std::uint64_t{number_at<std::uint16_t>(bytes)};
      break;
    case MetadataType::i16:
      item.value = std::int64_t{number_at<std::int16_t>(bytes)};
      break;
    case MetadataType::u32:
      item.value = std::uint64_t{number_at<std::uint32_t>(bytes)};
      break;
    case MetadataType::i32:
      item.value = std::int64_t{number_at<std::int32_t>(bytes)};
      break;
    case MetadataType::f32:
      item.value = double{number_at<float>(bytes)};
      break;
    case MetadataType::u64:
      item.value = number_at<std::uint64_t>(bytes);
      break;
    case MetadataType::i64:
      item.value = number_at<std::int64_t>(bytes);
      break;
    case MetadataType::f64:
      item.value = number_at<double>(bytes);
      break;
    case MetadataType::boolean:
      item.value = number_at<std::uint8_t>(bytes) != 0;
      break;
    case MetadataType::string:
    case MetadataType::array:
      break;  // no numbers
  }
  return item;
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
