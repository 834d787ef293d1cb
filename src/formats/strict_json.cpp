#include "formats/strict_json.h"

#include <charconv>
#include <new>

#include "base/named.h"
#include "base/text.h"

namespace loadstone {

namespace {

constexpr std::string_view whitespace = " \t\r\n";

// -?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?
bool is_number(std::string_view text) noexcept {
  std::size_t at = 0;
  const auto digits = [&] {
    const std::size_t begin = at;
    while (at < text.size() && text[at] >= '0' && text[at] <= '9') ++at;
    return at - begin;
  };
  const auto next_is = [&](std::string_view any) {
    return at < text.size() && any.find(text[at]) != std::string_view::npos;
  };
  if (next_is("-")) ++at;
  const bool leading_zero = next_is("0");
  const std::size_t count = digits();
  if (count == 0 || (leading_zero && count > 1)) return false;
  if (next_is(".")) {
    ++at;
    if (digits() == 0) return false;
  }
  if (next_is("eE")) {
    ++at;
    if (next_is("+-")) ++at;
    if (digits() == 0) return false;
  }
  return at == text.size();
}

// Detects that simdjson could not allocate memory for strings. simdjson itself ignores this and
// then writes to address 0.
struct Document : simdjson::ondemand::document {
  static bool has_strings(simdjson::ondemand::document& document) {
    return (document.*&Document::iter).string_buf_loc() != nullptr;
  }
};

}  // namespace

std::string_view name(JsonKind kind) noexcept {
  return name_among({"an object", "an array", "a string", "a number", "true or false", "null"},
                    kind);
}

StrictJson::StrictJson(const PaddedText& text) : text_(text.view()) {
  const simdjson::padded_string_view padded(text_.data(), text_.size(),
                                            text_.size() + simdjson::SIMDJSON_PADDING);
  document_ = checked(parser_.iterate(padded), "the text is not JSON");
  if (!Document::has_strings(document_)) throw std::bad_alloc();
}

JsonKind StrictJson::kind(Value& value) {
  const std::string_view raw = look_at(value);
  switch (raw.empty() ? '\0' : raw.front()) {
    case '{':
      return JsonKind::object;
    case '[':
      return JsonKind::array;
    case '"':
      return JsonKind::string;
    case 't':
    case 'f':
      return JsonKind::boolean;
    case 'n':
      return JsonKind::null;
    case '-':
      return JsonKind::number;
    default:
      if (!raw.empty() && raw.front() >= '0' && raw.front() <= '9') return JsonKind::number;
      fail("this is not a JSON value");
  }
}

std::string_view StrictJson::text(Value& value) {
  look_at(value);
  const std::string_view text = checked(value.get_string(), "a string is malformed");
  // Escapes can spell text that is not valid UTF-8.
  if (!is_utf8(text)) fail("a string contains an escape for only half of a surrogate pair");
  return text;
}

std::string_view StrictJson::token(Value& value) {
  const std::string_view raw = look_at(value);
  const bool valid = raw == "true" || raw == "false" || raw == "null" || is_number(raw);
  if (!valid) fail("this is not a JSON value");
  return raw;
}

std::string StrictJson::check(Value& value) {
  const JsonKind what = kind(value);
  switch (what) {
    case JsonKind::object:
      visit_members(value, [&](std::string_view, Value& member) { check(member); });
      break;
    case JsonKind::array:
      visit_items(value, [&](Value& item) { check(item); });
      break;
    case JsonKind::string:
      return "'" + std::string(text(value)) + "'";
    case JsonKind::number:
    case JsonKind::boolean:
    case JsonKind::null:
      return std::string(token(value));
  }
  return std::string(name(what));
}

std::string_view StrictJson::look_at(Value& value) {
  std::string_view raw = value.raw_json_token();
  position_ = static_cast<std::uint64_t>(raw.data() - text_.data());
  raw = raw.substr(0, raw.find_last_not_of(whitespace) + 1);
  return raw;
}

void StrictJson::require_end() {
  const auto location = document_.current_location();
  if (location.error() == simdjson::OUT_OF_BOUNDS) return;
  if (location.error() == simdjson::SUCCESS) {
    position_ = static_cast<std::uint64_t>(location.value_unsafe() - text_.data());
  }
  fail("there is more text after the end of the document");
}

void StrictJson::fail(const char* message, simdjson::error_code reason) const {
  if (reason == simdjson::MEMALLOC) throw std::bad_alloc();
  std::string text = message;
  if (reason != simdjson::SUCCESS) {
    // simdjson phrases some messages as advice; only the first sentence describes the error.
    const std::string_view said = simdjson::error_message(reason);
    text += " (" + std::string(said.substr(0, said.find('.'))) + ")";
  }
  throw JsonProblem{text, position_};
}

std::optional<std::uint64_t> parse_u64(std::string_view token) noexcept {
  std::uint64_t number = 0;
  const auto [end, problem] = std::from_chars(token.data(), token.data() + token.size(), number);
  if (problem != std::errc{} || end != token.data() + token.size() || token.empty()) {
    return std::nullopt;
  }
  return number;
}

}  // namespace loadstone
