// Parses untrusted JSON in one pass, in file order.
//
// simdjson's On-Demand front end is fast and exposes duplicates and the text of numbers, but checks
// only the values that are read. This layer reads everything: it walks and checks unused values,
// bounds nesting, and allows nothing after the document.
#pragma once

#include <simdjson.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace loadstone {

// A problem in the JSON text and its position. The reader of each format turns it into an Error.
struct JsonProblem {
  std::string message;
  std::uint64_t offset;
};

enum class JsonKind : std::uint8_t { object, array, string, number, boolean, null };

[[nodiscard]] std::string_view name(JsonKind kind) noexcept;

// Text with the padding after it that simdjson requires. Not thread-safe.
class PaddedText {
 public:
  explicit PaddedText(std::size_t bytes)
      : bytes_(bytes), text_(bytes + simdjson::SIMDJSON_PADDING, '\0') {}

  [[nodiscard]] char* data() noexcept { return text_.data(); }
  [[nodiscard]] std::string_view view() const noexcept { return {text_.data(), bytes_}; }

 private:
  std::size_t bytes_;
  std::vector<char> text_;
};

// A JSON document whose root is an object. Each value may be read once, in order. Throws
// JsonProblem. Not thread-safe.
class StrictJson {
 public:
  using Value = simdjson::ondemand::value;

  explicit StrictJson(const PaddedText& text);

  // Calls `visit(key, value)` for each member of the root, then checks that nothing follows.
  template <typename Visit>
  void visit_root(Visit&& visit) {
    auto root = checked(document_.get_object(), "the document is not an object");
    visit_object(root, visit);
    require_end();
  }

  // Visits the members in file order, including duplicates. The key is unescaped and stays valid as
  // long as this object.
  template <typename Visit>
  void visit_members(Value& value, Visit&& visit) {
    const Nesting nesting(*this);
    auto object = checked(value.get_object(), "an object is malformed");
    visit_object(object, visit);
  }

  template <typename Visit>
  void visit_items(Value& value, Visit&& visit) {
    const Nesting nesting(*this);
    auto array = checked(value.get_array(), "an array is malformed");
    for (auto each : array) {
      Value item = checked(std::move(each), "an array is malformed");
      visit(item);
    }
  }

  [[nodiscard]] JsonKind kind(Value& value);
  // Returns the unescaped text of a string, which stays valid as long as this object.
  [[nodiscard]] std::string_view text(Value& value);
  // Returns the text of a number, true, false or null, checked against JSON's grammar.
  [[nodiscard]] std::string_view token(Value& value);
  // Walks and checks a value of any kind. Returns a description for messages: the text of a string
  // or token, or "an object", "an array".
  std::string check(Value& value);

  // Position of the last value that was read.
  [[nodiscard]] std::uint64_t position() const noexcept { return position_; }

  static constexpr unsigned depth_max = 32;

 private:
  // Limits the depth, because unlimited recursion would let a file overflow the stack.
  class Nesting {
   public:
    explicit Nesting(StrictJson& json) : json_(json) {
      if (++json_.depth_ > depth_max) json_.fail("arrays or objects are nested too deeply");
    }
    ~Nesting() { --json_.depth_; }
    Nesting(const Nesting&) = delete;
    Nesting& operator=(const Nesting&) = delete;

   private:
    StrictJson& json_;
  };

  template <typename Object, typename Visit>
  void visit_object(Object& object, Visit& visit) {
    for (auto each : object) {
      auto field = checked(std::move(each), "an object is malformed");
      const std::string_view key = checked(field.unescaped_key(), "a key is malformed");
      Value value = field.value();
      visit(key, value);
    }
  }

  template <typename Item>
  Item checked(simdjson::simdjson_result<Item> result, const char* message) {
    if (result.error() != simdjson::SUCCESS) fail(message, result.error());
    return std::move(result).value_unsafe();
  }

  [[noreturn]] void fail(const char* message,
                         simdjson::error_code reason = simdjson::SUCCESS) const;
  std::string_view look_at(Value& value);
  void require_end();

  std::string_view text_;
  simdjson::ondemand::parser parser_;
  simdjson::ondemand::document document_;
  unsigned depth_ = 0;
  std::uint64_t position_ = 0;
};

// Parses an unsigned 64-bit integer. Returns nullopt if the token has a sign, a decimal point or an
// exponent, or is too large.
[[nodiscard]] std::optional<std::uint64_t> parse_u64(std::string_view token) noexcept;

}  // namespace loadstone
