#include "loadstone/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <system_error>

#include "base/text.h"

namespace loadstone {

namespace {

std::string line(const std::string& code, const std::string& message, const Where& where) {
  std::string text;
  if (!where.path.empty()) text += printable(where.path, 400) + ": ";
  if (!where.tensor.empty()) text += fmt::format("'{}': ", printable(where.tensor));
  if (!where.field.empty()) text += fmt::format("{}: ", printable(where.field));
  text += printable(message, 2000);
  if (!where.found.empty()) text += fmt::format("; found {}", printable(where.found));
  if (!where.expected.empty()) text += fmt::format("; expected {}", printable(where.expected));
  if (where.byte_offset) text += fmt::format("; at byte {}", *where.byte_offset);
  if (where.system_error != 0) {
    text += fmt::format("; {}", std::generic_category().message(where.system_error));
  }
  return text + " [" + code + "]";
}

// Removes secrets from the strings of an error. Every error passes through this function.
Where public_where(Where where) {
  for (std::string* const text :
       {&where.path, &where.tensor, &where.field, &where.found, &where.expected}) {
    *text = without_secrets(*text);
  }
  return where;
}

}  // namespace

Error::Error(std::string code, std::string message, Where where, std::vector<Error> others)
    : std::runtime_error(line(code, message, where)),
      code_(std::move(code)),
      message_(without_secrets(message)),
      where_(public_where(std::move(where))) {
  if (!others.empty()) others_ = std::make_shared<const std::vector<Error>>(std::move(others));
}

const std::vector<Error>& Error::others() const noexcept {
  static const std::vector<Error> none;
  return others_ == nullptr ? none : *others_;
}

int exit_status(std::string_view code) noexcept {
  const auto starts = [&](std::string_view prefix) {
    return code.substr(0, prefix.size()) == prefix;
  };
  if (code == "cancelled") return 130;
  if (code == "usage" || code == "convert.target" || code == "io.exists" ||
      code == "plan.options") {
    return 2;
  }
  if (starts("memory.") || code == "plan.over_budget") return 5;
  if (starts("io.")) return 4;
  for (const std::string_view format :
       {"st.", "ix.", "gg.", "im.", "pt.", "dcp.", "q.", "format."}) {
    if (starts(format)) return 3;
  }
  return 1;
}

const CodeInfo* find_code(std::string_view code) noexcept {
  const auto codes = all_codes();
  const auto found = std::ranges::lower_bound(codes, code, {}, &CodeInfo::code);
  return found != codes.end() && found->code == code ? &*found : nullptr;
}

}  // namespace loadstone
