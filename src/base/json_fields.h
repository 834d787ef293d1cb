// Reads loadstone's own JSON documents strictly: every value must have the expected type, every
// field must be known and occur once, and errors name the field. Headers of checkpoints are read by
// formats/.
#pragma once

#include <simdjson.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/json_writer.h"
#include "base/named.h"
#include "base/text.h"
#include "loadstone/error.h"

namespace loadstone {

// The position of a value in the document, as a chain of frames. Nothing is allocated until text()
// formats it. The parent must outlive it.
struct JsonPlace {
  const JsonPlace* parent = nullptr;
  std::string_view key;   // of a field; empty for a list item
  std::size_t index = 0;  // of a list item, if `key` is empty

  // "targets[3].shape"
  [[nodiscard]] std::string text() const;
};

// Parses one document. `code` is the code of every Error that reading throws. Not thread-safe.
class JsonDocument {
 public:
  using Element = simdjson::dom::element;

  // Throws Error `code` for invalid JSON, and for a text longer than `bytes_max`.
  JsonDocument(std::string_view text, std::string_view code, std::size_t bytes_max);

  [[nodiscard]] Element root() const { return root_; }

 private:
  simdjson::dom::parser parser_;
  Element root_;
};

// Reads values, and throws Error `code` that names the position of the value as its field.
class JsonReader {
 public:
  using Element = simdjson::dom::element;

  explicit JsonReader(std::string_view code) : code_(code) {}

  [[noreturn]] void refuse(const JsonPlace& place, std::string_view message, std::string found = {},
                           std::string expected = {}) const;
  [[nodiscard]] simdjson::dom::object object(Element value, const JsonPlace& place) const;
  [[nodiscard]] simdjson::dom::array array(Element value, const JsonPlace& place) const;
  [[nodiscard]] std::uint64_t unsigned_number(Element value, const JsonPlace& place) const;
  // Reads an integer of at most 32 bits.
  [[nodiscard]] std::uint32_t small_number(
      Element value, const JsonPlace& place,
      std::string_view problem = "the number is too large") const;
  [[nodiscard]] std::int64_t signed_number(Element value, const JsonPlace& place) const;
  [[nodiscard]] double real_number(Element value, const JsonPlace& place) const;
  [[nodiscard]] bool boolean(Element value, const JsonPlace& place) const;
  [[nodiscard]] std::string_view string(Element value, const JsonPlace& place) const;
  // Reads what JsonWriter::value() writes. For other types, define read_json(const JsonReader&,
  // value, place, item).
  template <typename Item, typename... Context>
  void read(Element value, const JsonPlace& place, Item&& item, const Context&... context) const;
  // Returns the enumerator with this name.
  template <typename Enum>
  [[nodiscard]] Enum named(Element value, const JsonPlace& place) const {
    const std::string_view text = string(value, place);
    if (const auto known = from_name<Enum>(text)) return *known;
    refuse(place, "the value is not one of the allowed words", printable(text),
           either(names_of<Enum>()));
  }

 private:
  std::string_view code_;
};

// The fields of one object. Not thread-safe.
//
// A struct has one function for reading and writing, which JsonWriter and JsonObject call:
//   template <typename Visitor>
//   void visit_fields(Visitor& visitor, Like<Widget> auto& widget) {
//     visitor.member("name", widget.name);
//     visitor.optional("size", widget.size);
//     if constexpr (Visitor::is_reading) {
//       if (widget.size > 9) visitor.refuse("size", "too large");
//     }
//   }
class JsonObject {
 public:
  static constexpr bool is_reading = true;

  using Element = simdjson::dom::element;

  // Throws for a value that is not an object, and for repeated fields.
  JsonObject(const JsonReader& reader, Element value, const JsonPlace& place);

  [[nodiscard]] const JsonReader& reader() const { return reader_; }
  [[nodiscard]] const JsonPlace& place() const { return place_; }
  [[nodiscard]] JsonPlace at(std::string_view field) const { return {&place_, field, 0}; }
  [[nodiscard]] Element required(std::string_view field);
  // Returns nullopt if the field is missing or null.
  [[nodiscard]] std::optional<Element> optional(std::string_view field);
  template <typename Item, typename... Context>
  void member(std::string_view field, Item&& item, const Context&... context) {
    reader_.read(required(field), at(field), item, context...);
  }
  // Leaves the item unchanged if the field is missing. Returns true if it exists.
  template <typename Item, typename... Context>
  bool optional(std::string_view field, Item&& item, const Context&... context) {
    const auto value = optional(field);
    if (value) reader_.read(*value, at(field), item, context...);
    return value.has_value();
  }
  [[noreturn]] void refuse(std::string_view field, std::string_view message, std::string found = {},
                           std::string expected = {}) const {
    reader_.refuse(at(field), message, std::move(found), std::move(expected));
  }
  // Throws if the field "version" has a different number.
  void require_version(std::uint64_t version);
  // Throws for fields that have not been read.
  void done() const;

 private:
  static constexpr std::size_t fields_max = 32;
  struct Field {
    std::string_view name;
    Element value;
    bool used = false;
  };

  const JsonReader& reader_;
  JsonPlace place_;
  std::array<Field, fields_max> fields_ = {};
  std::size_t count_ = 0;
};

template <typename Item, typename... Context>
void JsonReader::read(Element value, const JsonPlace& place, Item&& item,
                      const Context&... context) const {
  using Type = std::remove_cvref_t<Item>;
  if constexpr (requires { read_json(*this, value, place, item); }) {
    read_json(*this, value, place, item);
  } else if constexpr (std::same_as<Type, std::string>) {
    item = string(value, place);
  } else if constexpr (std::same_as<Type, bool>) {
    item = boolean(value, place);
  } else if constexpr (std::same_as<Type, std::uint32_t>) {
    item = small_number(value, place);
  } else if constexpr (std::unsigned_integral<Type>) {
    item = unsigned_number(value, place);
  } else if constexpr (std::signed_integral<Type>) {
    item = signed_number(value, place);
  } else if constexpr (std::floating_point<Type>) {
    item = real_number(value, place);
  } else if constexpr (std::is_enum_v<Type>) {
    item = named<Type>(value, place);
  } else if constexpr (requires { typename Type::mapped_type; }) {
    for (const auto field : object(value, place)) {
      const JsonPlace at = {&place, field.key, 0};
      const auto [added, is_new] = item.try_emplace(std::string(field.key));
      if (!is_new) refuse(at, "the field is repeated");
      read(field.value, at, added->second, context...);
    }
  } else if constexpr (requires { typename Type::element_type; }) {
    const auto made = std::make_shared<std::remove_const_t<typename Type::element_type>>();
    read(value, place, *made, context...);
    item = made;
  } else if constexpr (requires { item.emplace(); }) {
    read(value, place, item.emplace(), context...);
  } else if constexpr (requires { item.emplace_back(); }) {
    for (const auto each : array(value, place)) {
      const JsonPlace at = {&place, {}, item.size()};
      read(each, at, item.emplace_back(), context...);
    }
  } else {
    JsonObject fields(*this, value, place);
    visit_fields(fields, item, context...);
    fields.done();
  }
}

// A list whose items have separate positions in errors.
template <typename List>
struct JsonFlat {
  explicit JsonFlat(List& given) : list(given) {}

  [[nodiscard]] bool empty() const noexcept { return list.empty(); }

  List& list;
};
template <typename List>
void write_json(JsonWriter& json, JsonFlat<List> flat) {
  json.value(flat.list);
}
template <typename List>
void read_json(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place,
               JsonFlat<List> flat) {
  for (const auto each : reader.array(value, place)) {
    reader.read(each, place, flat.list.emplace_back());
  }
}

}  // namespace loadstone
