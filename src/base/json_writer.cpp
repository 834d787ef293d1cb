#include "base/json_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/text.h"

namespace loadstone {

void JsonWriter::separate() {
  if (after_key_) {
    after_key_ = false;
    return;
  }
  if (has_items_.empty()) return;
  if (has_items_.back()) text_ += ',';
  has_items_.back() = true;
  line_break(has_items_.size());
}

void JsonWriter::line_break(std::size_t depth) {
  if (indent_ == 0 || depth > depth_max_) return;
  text_ += '\n';
  text_.append(depth * indent_, ' ');
}

void JsonWriter::begin(char bracket) {
  separate();
  text_ += bracket;
  has_items_.push_back(false);
}

void JsonWriter::end(char bracket) {
  const bool had_items = has_items_.back();
  const std::size_t depth = has_items_.size();
  has_items_.pop_back();
  if (had_items && depth <= depth_max_) line_break(depth - 1);
  text_ += bracket;
}

void JsonWriter::key(std::string_view name) {
  separate();
  quote(name);
  text_ += indent_ == 0 ? ":" : ": ";
  after_key_ = true;
}

void JsonWriter::null() { literal("null"); }

void JsonWriter::text(std::string_view item) {
  separate();
  quote(item);
}

void JsonWriter::literal(std::string_view item) {
  separate();
  text_ += item;
}

void JsonWriter::number(double item) {
  literal(std::isfinite(item) ? fmt::format("{}", item) : "null");
}

void JsonWriter::quote(std::string_view text) {
  // Paths and some metadata strings may contain invalid UTF-8, which JSON does not allow.
  const bool valid = is_utf8(text);
  lossy_ = lossy_ || !valid;
  const auto is_plain = [&](char character) {
    const auto byte = static_cast<unsigned char>(character);
    return byte >= 0x20 && byte != 0x7f && (valid || byte < 0x80) && byte != '"' && byte != '\\';
  };
  text_ += '"';
  for (auto at = text.begin();; ++at) {
    const auto end = std::find_if_not(at, text.end(), is_plain);
    text_.append(at, end);
    if (end == text.end()) break;
    at = end;
    if (*at == '"' || *at == '\\') {
      text_ += '\\';
      text_ += *at;
    } else {
      text_ += fmt::format("\\u{:04x}", static_cast<unsigned char>(*at));
    }
  }
  text_ += '"';
}

}  // namespace loadstone
