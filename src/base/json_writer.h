// Writes JSON text piece by piece. Commas and escapes are its business; balance is the caller's.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace loadstone {

// Not thread-safe.
class JsonWriter {
 public:
  // indent 0: one line. Otherwise objects and arrays are broken into lines down to `depth_max`
  // levels.
  explicit JsonWriter(unsigned indent = 0, unsigned depth_max = 2)
      : indent_(indent), depth_max_(depth_max) {}

  void begin_object() { begin('{'); }
  void end_object() { end('}'); }
  void begin_array() { begin('['); }
  void end_array() { end(']'); }
  void key(std::string_view name);

  void value(std::string_view text);
  void value(const char* text) { value(std::string_view(text)); }
  void value(const std::string& text) { value(std::string_view(text)); }
  void value(bool truth);
  void value(double number);  // not finite: null
  void null();
  template <std::integral Integer>
  void value(Integer number) {
    separate();
    text_ += std::to_string(number);
  }
  // An array of anything that value() takes.
  template <typename Item>
  void value(const std::vector<Item>& items) {
    begin_array();
    for (const auto& item : items) value(item);
    end_array();
  }

  template <typename Value>
  void member(std::string_view name, const Value& item) {
    key(name);
    value(item);
  }
  // A value that is JSON already.
  void raw(std::string_view json);

  // Whether a text was no UTF-8 so far, and is written with its bytes as numbers of characters: a
  // reader gets another text.
  [[nodiscard]] bool is_lossy() const noexcept { return lossy_; }
  [[nodiscard]] std::string take() { return std::move(text_); }

 private:
  void begin(char bracket);
  void end(char bracket);
  void separate();
  void quote(std::string_view text);
  void line_break(std::size_t depth);

  std::string text_;
  unsigned indent_;
  unsigned depth_max_;
  std::vector<bool> has_items_;
  bool after_key_ = false;
  bool lossy_ = false;
};

}  // namespace loadstone
