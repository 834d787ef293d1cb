#include "base/python_json.h"

#include <array>
#include <charconv>
#include <cstdint>

#include "base/json_dom.h"
#include "base/text.h"

namespace loadstone {

namespace {

using Fault = PythonJson::Fault;

constexpr unsigned python_depth_max = 1000;  // about Python's limit; simdjson's is 1024

bool is_parsed(std::string_view number) {
  dom::parser parser;
  return parsed_json(parser, number).error() == simdjson::SUCCESS;
}

// Throws Fault. Not thread-safe.
class Reader {
 public:
  explicit Reader(PythonJson& json) : json_(json), text_(json.text) {}

  void read() {
    if (text_.starts_with("\xef\xbb\xbf")) fail("the text begins with a byte order mark");
    value(0);
    skip_space();
    if (at_ < text_.size()) fail("there is more text after the end of the document");
  }

 private:
  [[noreturn]] void fail(std::string_view message) const { throw Fault{message, at_}; }

  [[nodiscard]] char now() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  [[nodiscard]] bool is_digit() const { return now() >= '0' && now() <= '9'; }

  bool take(std::string_view word) {
    if (!std::string_view(text_).substr(at_).starts_with(word)) return false;
    at_ += word.size();
    return true;
  }

  void skip_space() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string::npos)
      ++at_;
  }

  void value(unsigned depth) {
    if (depth > python_depth_max) fail("arrays or objects are nested too deeply");
    skip_space();
    if (now() == '{') return object(depth);
    if (now() == '[') return array(depth);
    if (now() == '"') return string();
    if (take("true") || take("false") || take("null")) return;
    number();
  }

  void object(unsigned depth) {
    items('}', [&] {
      if (now() != '"') fail("expected a key in quotes");
      string();
      skip_space();
      if (!take(":")) fail("expected ':'");
      value(depth + 1);
    });
  }

  void array(unsigned depth) {
    items(']', [&] { value(depth + 1); });
  }

  template <typename Item>
  void items(char close, Item&& item) {
    ++at_;
    skip_space();
    for (bool is_first = true; now() != close || !is_first; is_first = false) {
      skip_space();
      item();
      skip_space();
      if (now() == close) break;
      if (!take(",")) fail(close == '}' ? "expected ',' or '}'" : "expected ',' or ']'");
    }
    ++at_;
  }

  void string() {
    const std::size_t begin = at_++;
    while (now() != '"') {
      if (at_ >= text_.size()) throw Fault{"a string has no closing quote", begin};
      if (static_cast<unsigned char>(text_[at_]) < 0x20)
        fail("a string contains a control character");
      if (text_[at_] == '\\') {
        escape();
      } else {
        ++at_;
      }
    }
    ++at_;
    const auto part = std::string_view(text_).substr(begin, at_ - begin);
    if (!is_utf8(part)) throw Fault{"a string is not UTF-8", begin};
  }

  // Returns the code unit of an escape such as "\u12ab".
  [[nodiscard]] std::optional<std::uint32_t> unit_at(std::size_t at) const {
    constexpr std::size_t length = 6;
    const auto escaped = std::string_view(text_).substr(std::min(at, text_.size()), length);
    if (escaped.size() < length || !escaped.starts_with("\\u")) return std::nullopt;
    std::uint32_t unit = 0;
    const auto [end, problem] = std::from_chars(escaped.begin() + 2, escaped.end(), unit, 16);
    if (problem != std::errc{} || end != escaped.end()) return std::nullopt;
    return unit;
  }

  void escape() {
    const std::size_t begin = at_++;
    if (at_ == text_.size()) return;  // the string is unterminated
    if (now() != 'u') {
      constexpr std::string_view known = "\"\\/bfnrt";
      if (known.find(now()) == known.npos)
        throw Fault{"a string contains an invalid escape", begin};
      ++at_;
      return;
    }
    const auto unit = unit_at(begin);
    if (!unit) throw Fault{"a string contains an invalid escape", begin};
    at_ = begin + 6;
    if (*unit < 0xd800 || *unit > 0xdfff) return;
    const auto next = unit_at(at_);
    if (*unit < 0xdc00 && next && *next >= 0xdc00 && *next <= 0xdfff) {
      at_ += 6;
    } else {
      text_.replace(begin, 6, "\\ufffd");
    }
  }

  void digits() {
    if (!is_digit()) fail("expected a digit");
    while (is_digit()) ++at_;
  }

  void number() {
    const std::size_t begin = at_;
    if (take("NaN") || take("Infinity") || take("-Infinity")) return infinite(begin);
    take("-");
    if (!is_digit()) throw Fault{"expected a value", begin};
    if (!take("0")) digits();
    bool is_integer = true;
    if (take(".")) {
      digits();
      is_integer = false;
    }
    if (take("e") || take("E")) {
      if (!take("+")) take("-");
      digits();
      is_integer = false;
    }
    const auto written = [&] { return std::string_view(text_).substr(begin, at_ - begin); };
    constexpr std::size_t safe_digits = 18;
    if (is_integer ? written().size() <= safe_digits : is_parsed(written())) return;
    if (is_parsed(written())) return;
    // Dropping three digits changes the value by less than the precision of doubles.
    constexpr std::string_view thousands = "e03";
    if (is_integer) text_.replace(at_ - thousands.size(), thousands.size(), thousands);
    if (!is_integer || !is_parsed(written())) infinite(begin);
  }

  void infinite(std::size_t begin) {
    text_.replace(begin, at_ - begin, at_ - begin, ' ');
    text_[begin] = '0';
    json_.has_infinite = true;
  }

  PythonJson& json_;
  std::string& text_;
  std::size_t at_ = 0;
};

}  // namespace

PythonJson python_json(std::string_view document) {
  PythonJson json{.text = std::string(document)};
  try {
    Reader(json).read();
  } catch (const Fault& fault) {
    json.fault = fault;
  }
  return json;
}

}  // namespace loadstone
