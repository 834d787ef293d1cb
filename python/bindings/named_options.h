// Converts Python keyword arguments to a C++ options struct.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

#include "bindings.h"

namespace loadstone::python {

// Returns the Python name of an option's type. In nanobind's "@accepted@returned@", selects the
// accepted type.
template <typename Value>
std::string python_type() {
  if constexpr (std::is_pointer_v<Value>) {
    using Class = std::remove_cv_t<std::remove_pointer_t<Value>>;
    return "loadstone." + nb::cast<std::string>(nb::type<Class>().attr("__name__"));
  } else {
    const std::string_view text = nb::detail::make_caster<Value>::Name.text;
    std::string name;
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (text[i] != '@') {
        name += text[i];
      } else {
        const std::size_t taken_end = text.find('@', i + 1);
        name += text.substr(i + 1, taken_end - i - 1);
        i = text.find('@', taken_end + 1);
      }
    }
    return std::is_unsigned_v<Value> && name == "int" ? "int, 0 or more" : name;
  }
}

// Options by name. Reading an option consumes it. An absent option keeps the core's default.
// Enumerators and dtypes are given as words; an empty word counts as absent.
class NamedOptions {
 public:
  explicit NamedOptions(const nb::kwargs& given) : left_(given) {}

  template <typename Value>
  void take(const char* name, Value& value) {
    if (!left_.contains(name)) return;
    const nb::object given = left_[name];
    if (!nb::try_cast(given, value)) {
      throw Error("plan.options", "an option has a value of the wrong type",
                  {.field = name,
                   .found = printable(nb::repr(given).c_str()),
                   .expected = python_type<Value>()});
    }
    nb::del(left_[name]);
  }
  template <typename Enum>
  requires std::is_enum_v<Enum>
  void take(const char* name, Enum& value) {
    if (const auto text = take<std::string>(name); !text.empty()) value = word<Enum>(name, text);
  }
  template <typename Enum>
  requires std::is_enum_v<Enum>
  void take(const char* name, std::optional<Enum>& value) {
    if (const auto text = take<std::string>(name); !text.empty()) value = word<Enum>(name, text);
  }
  template <typename Value>
  [[nodiscard]] Value take(const char* name) {
    Value value{};
    take(name, value);
    return value;
  }
  void done() const {
    for (const auto [name, value] : left_) {
      throw Error("usage", "no option has this name", {.field = nb::cast<std::string>(name)});
    }
  }

 private:
  template <typename Enum>
  [[nodiscard]] static Enum word(const char* name, std::string_view text) {
    if constexpr (std::is_same_v<Enum, Dtype>) {
      return dtype_argument(text);
    } else if constexpr (std::is_same_v<Enum, DigestKind>) {
      return digest_kind(text);
    } else {
      return enum_argument<Enum>(name, text);
    }
  }

  nb::dict left_;
};

}  // namespace loadstone::python
