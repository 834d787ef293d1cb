#include "base/json_fields.h"

#include <fmt/format.h>

#include <limits>

#include "base/text.h"

namespace loadstone {

namespace {

constexpr std::size_t parse_depth_max = 32;

std::string type_name(simdjson::dom::element value) {
  switch (value.type()) {
    case simdjson::dom::element_type::ARRAY:
      return "an array";
    case simdjson::dom::element_type::OBJECT:
      return "an object";
    case simdjson::dom::element_type::STRING:
      return fmt::format("\"{}\"", printable(value.get_string().value_unsafe(), 80));
    case simdjson::dom::element_type::NULL_VALUE:
      return "null";
    default:
      return simdjson::minify(value);
  }
}

}  // namespace

std::string JsonPlace::text() const {
  std::string before = parent == nullptr ? std::string() : parent->text();
  if (key.empty()) return parent == nullptr ? before : fmt::format("{}[{}]", before, index);
  if (!before.empty()) before += '.';
  return before + std::string(key);
}

JsonDocument::JsonDocument(std::string_view text, std::string_view code, std::size_t bytes_max) {
  if (text.size() > bytes_max) {
    throw Error(std::string(code), "the text is too long",
                {.found = human_bytes(text.size()),
                 .expected = fmt::format("at most {}", human_bytes(bytes_max))});
  }
  if (text.empty()) text = "";  // a null pointer is replaced, because the parser copies from it
  auto problem = parser_.allocate(text.size() + 1, parse_depth_max);
  if (problem == simdjson::SUCCESS) problem = parser_.parse(text.data(), text.size()).get(root_);
  if (problem == simdjson::MEMALLOC) throw std::bad_alloc();
  if (problem != simdjson::SUCCESS) {
    throw Error(std::string(code), fmt::format("not JSON: {}", simdjson::error_message(problem)));
  }
}

void JsonReader::refuse(const JsonPlace& place, std::string_view message, std::string found,
                        std::string expected) const {
  throw Error(std::string(code_), std::string(message),
              {.field = place.text(), .found = std::move(found), .expected = std::move(expected)});
}

simdjson::dom::object JsonReader::object(Element value, const JsonPlace& place) const {
  simdjson::dom::object fields;
  if (value.get(fields) != simdjson::SUCCESS) {
    refuse(place, "the value has the wrong type", type_name(value), "an object");
  }
  return fields;
}

simdjson::dom::array JsonReader::array(Element value, const JsonPlace& place) const {
  simdjson::dom::array items;
  if (value.get(items) != simdjson::SUCCESS)
    refuse(place, "the value has the wrong type", type_name(value), "an array");
  return items;
}

std::uint64_t JsonReader::unsigned_number(Element value, const JsonPlace& place) const {
  std::uint64_t number = 0;
  if (value.get(number) != simdjson::SUCCESS) {
    refuse(place, "the value has the wrong type", type_name(value),
           "a whole number from 0 to 2^64 - 1");
  }
  return number;
}

std::uint32_t JsonReader::small_number(Element value, const JsonPlace& place,
                                       std::string_view problem) const {
  const std::uint64_t number = unsigned_number(value, place);
  if (number > UINT32_MAX) refuse(place, problem, std::to_string(number));
  return static_cast<std::uint32_t>(number);
}

double JsonReader::real_number(Element value, const JsonPlace& place) const {
  double number = 0;
  if (value.get(number) != simdjson::SUCCESS) {
    refuse(place, "the value has the wrong type", type_name(value), "a number");
  }
  return number;
}

bool JsonReader::boolean(Element value, const JsonPlace& place) const {
  bool truth = false;
  if (value.get(truth) != simdjson::SUCCESS) {
    refuse(place, "the value has the wrong type", type_name(value), "true or false");
  }
  return truth;
}

std::int64_t JsonReader::signed_number(Element value, const JsonPlace& place) const {
  std::int64_t number = 0;
  if (value.get(number) != simdjson::SUCCESS) {
    refuse(place, "the value has the wrong type", type_name(value),
           "a whole number from -2^63 to 2^63 - 1");
  }
  return number;
}

std::string_view JsonReader::string(Element value, const JsonPlace& place) const {
  std::string_view text;
  if (value.get(text) != simdjson::SUCCESS)
    refuse(place, "the value has the wrong type", type_name(value), "a string");
  return text;
}

JsonObject::JsonObject(const JsonReader& reader, Element value, const JsonPlace& place)
    : reader_(reader), place_(place) {
  for (const auto field : reader_.object(value, place_)) {
    for (std::size_t i = 0; i < count_; ++i) {
      if (fields_[i].name == field.key) reader_.refuse(at(field.key), "the field is repeated");
    }
    if (count_ == fields_max) reader_.refuse(place_, "the object has too many fields");
    fields_[count_++] = {field.key, field.value, false};
  }
}

JsonObject::Element JsonObject::required(std::string_view field) {
  for (std::size_t i = 0; i < count_; ++i) {
    if (fields_[i].name != field) continue;
    fields_[i].used = true;
    return fields_[i].value;
  }
  reader_.refuse(at(field), "the field is missing");
}

std::optional<JsonObject::Element> JsonObject::optional(std::string_view field) {
  for (std::size_t i = 0; i < count_; ++i) {
    if (fields_[i].name != field) continue;
    fields_[i].used = true;
    if (fields_[i].value.is_null()) return std::nullopt;
    return fields_[i].value;
  }
  return std::nullopt;
}

void JsonObject::require_version(std::uint64_t version) {
  std::uint64_t found = 0;
  member("version", found);
  if (found == version) return;
  refuse("version", "this version is not supported", std::to_string(found),
         std::to_string(version));
}

void JsonObject::done() const {
  for (std::size_t i = 0; i < count_; ++i) {
    if (!fields_[i].used) reader_.refuse(at(fields_[i].name), "the field is unknown");
  }
}

}  // namespace loadstone
