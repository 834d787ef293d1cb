#include "base/json_writer.h"

#include <fmt/format.h>

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

void JsonWriter::value(std::string_view text) {
  separate();
  quote(text);
}

void JsonWriter::value(bool truth) {
  separate();
  text_ += truth ? "true" : "false";
}

void JsonWriter::value(double number) {
  separate();
  text_ += std::isfinite(number) ? fmt::format("{}", number) : "null";
}

void JsonWriter::null() {
  separate();
  text_ += "null";
}

void JsonWriter::raw(std::string_view json) {
  separate();
  text_ += json;
}

void JsonWriter::quote(std::string_view text) {
  // Paths and a few metadata strings may hold bytes that are no UTF-8; JSON may not.
  const bool valid = is_utf8(text);
  lossy_ = lossy_ || !valid;
  text_ += '"';
  for (const char character : text) {
    const auto byte = static_cast<unsigned char>(character);
    if (character == '"' || character == '\\') {
      text_ += '\\';
      text_ += character;
    } else if (byte < 0x20 || byte == 0x7f || (!valid && byte >= 0x80)) {
      text_ += fmt::format("\\u{:04x}", byte);
    } else {
      text_ += character;
    }
  }
  text_ += '"';
}

}  // namespace loadstone
