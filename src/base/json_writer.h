// Writes JSON text step by step. The writer adds commas and escapes; the caller must balance begin
// and end calls.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace loadstone {

// Accepts the struct of a visit_fields() function, which is const while it is written.
template <typename Item, typename Struct>
concept Like = std::same_as<std::remove_const_t<Item>, Struct>;

// Not thread-safe.
class JsonWriter {
 public:
  static constexpr bool is_reading = false;

  // Indentation of 0 writes one line. Otherwise objects and arrays are broken into lines down to
  // `depth_max` levels.
  explicit JsonWriter(unsigned indent = 0, unsigned depth_max = 2)
      : indent_(indent), depth_max_(depth_max) {}

  void begin_object() { begin('{'); }
  void end_object() { end('}'); }
  void begin_array() { begin('['); }
  void end_array() { end(']'); }
  void key(std::string_view name);

  void null();
  // Writes strings, numbers (null if not finite), enums by name(), vectors, pairs as arrays, maps
  // as objects, and the values of optionals and pointers. For other types, define
  // write_json(JsonWriter&, item), or visit_fields(visitor, item, context...) for a struct: see
  // JsonObject.
  template <typename Item, typename... Context>
  void value(const Item& item, const Context&... context) {
    if constexpr (requires { write_json(*this, item); }) {
      write_json(*this, item);
    } else if constexpr (std::convertible_to<const Item&, std::string_view>) {
      text(item);
    } else if constexpr (std::same_as<Item, bool>) {
      literal(item ? "true" : "false");
    } else if constexpr (std::floating_point<Item>) {
      number(item);
    } else if constexpr (std::integral<Item>) {
      literal(std::to_string(item));
    } else if constexpr (std::is_enum_v<Item>) {
      text(name(item));
    } else if constexpr (requires { item ? *item : *item; }) {
      if (item) {
        value(*item, context...);
      } else {
        null();
      }
    } else if constexpr (requires { item.first, item.second; }) {
      array(item.first, item.second);
    } else if constexpr (requires { typename Item::mapped_type; }) {
      begin_object();
      for (const auto& [key, each] : item) member(key, each, context...);
      end_object();
    } else if constexpr (requires { item.begin() != item.end(); }) {
      begin_array();
      for (const auto& each : item) value(each, context...);
      end_array();
    } else {
      begin_object();
      visit_fields(*this, item, context...);
      end_object();
    }
  }
  template <typename... Items>
  void array(const Items&... items) {
    begin_array();
    (value(items), ...);
    end_array();
  }

  template <typename Item, typename... Context>
  void member(std::string_view name, const Item& item, const Context&... context) {
    key(name);
    value(item, context...);
  }
  // Omits an item that is empty, 0, false or null. Returns true if it was written.
  template <typename Item, typename... Context>
  bool optional(std::string_view name, const Item& item, const Context&... context) {
    if constexpr (requires { item.empty(); }) {
      if (item.empty()) return false;
    } else {
      if (!item) return false;
    }
    member(name, item, context...);
    return true;
  }
  // Writes a value that is already JSON.
  void raw(std::string_view json) { literal(json); }

  // Returns true if a string was invalid UTF-8. Its bytes were then written as code points, so a
  // reader gets a different string.
  [[nodiscard]] bool is_lossy() const noexcept { return lossy_; }
  [[nodiscard]] std::string take() { return std::move(text_); }

 private:
  void begin(char bracket);
  void end(char bracket);
  void separate();
  void text(std::string_view item);
  void literal(std::string_view item);
  void number(double item);
  void quote(std::string_view text);
  void line_break(std::size_t depth);

  std::string text_;
  unsigned indent_;
  unsigned depth_max_;
  std::vector<bool> has_items_;
  bool after_key_ = false;
  bool lossy_ = false;
};

// Returns the JSON of one value.
template <typename Item>
[[nodiscard]] std::string json_text(const Item& item, unsigned indent = 0, unsigned depth_max = 2) {
  JsonWriter json(indent, depth_max);
  json.value(item);
  return json.take();
}

}  // namespace loadstone
