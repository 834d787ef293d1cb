// Strict reading of JSON documents of ours: every value has the expected type, every field is known
// and stands there once, and an error says where. For headers of checkpoints see formats/.
#pragma once

#include <simdjson.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/named.h"
#include "base/text.h"
#include "loadstone/error.h"

namespace loadstone {

// Where a value stands, as a chain of frames that costs nothing until it is printed. The parent
// must outlive it.
struct JsonPlace {
  const JsonPlace* parent = nullptr;
  std::string_view key;   // a field, or
  std::size_t index = 0;  // an item, where key is empty

  // "targets[3].shape"
  [[nodiscard]] std::string text() const;
};

// Reads one document; its code is that of every Error thrown. Not thread-safe.
class JsonDocument {
 public:
  using Element = simdjson::dom::element;

  // Throws Error `code` for text that is no JSON, or longer than `bytes_max`.
  JsonDocument(std::string_view text, std::string_view code, std::size_t bytes_max);

  [[nodiscard]] Element root() const { return root_; }

 private:
  simdjson::dom::parser parser_;
  Element root_;
};

// Functions that throw Error `code` with the place as its field.
class JsonReader {
 public:
  using Element = simdjson::dom::element;

  explicit JsonReader(std::string_view code) : code_(code) {}

  [[noreturn]] void refuse(const JsonPlace& place, std::string_view message, std::string found = {},
                           std::string expected = {}) const;
  [[nodiscard]] simdjson::dom::array array(Element value, const JsonPlace& place) const;
  [[nodiscard]] std::uint64_t unsigned_number(Element value, const JsonPlace& place) const;
  [[nodiscard]] std::int64_t signed_number(Element value, const JsonPlace& place) const;
  [[nodiscard]] bool boolean(Element value, const JsonPlace& place) const;
  [[nodiscard]] std::string_view string(Element value, const JsonPlace& place) const;
  // The enumerator of this name.
  template <typename Enum>
  [[nodiscard]] Enum named(Element value, const JsonPlace& place) const {
    const std::string_view text = string(value, place);
    if (const auto known = from_name<Enum>(text)) return *known;
    refuse(place, "unknown word", printable(text), either(names_of<Enum>()));
  }

 private:
  std::string_view code_;
};

// The fields of one object. Not thread-safe.
class JsonObject {
 public:
  using Element = simdjson::dom::element;

  // Refuses what is no object and fields that stand there twice.
  JsonObject(const JsonReader& reader, Element value, const JsonPlace& place);

  [[nodiscard]] const JsonPlace& place() const { return place_; }
  [[nodiscard]] JsonPlace at(std::string_view field) const { return {&place_, field, 0}; }
  [[nodiscard]] Element required(std::string_view field);
  // Nothing for null too.
  [[nodiscard]] std::optional<Element> optional(std::string_view field);
  // Refuses a field that nobody asked for.
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

}  // namespace loadstone
