// Adds terminal colours to text. The caller decides if colours are used.
#pragma once

#include <string>
#include <string_view>

namespace loadstone {

struct TextStyle {
  bool is_coloured = false;

  [[nodiscard]] std::string error(std::string_view text) const { return in("1;31", text); }
  [[nodiscard]] std::string warning(std::string_view text) const { return in("1;33", text); }
  [[nodiscard]] std::string ok(std::string_view text) const { return in("1;32", text); }
  [[nodiscard]] std::string strong(std::string_view text) const { return in("1", text); }

 private:
  [[nodiscard]] std::string in(std::string_view code, std::string_view text) const {
    if (!is_coloured || text.empty()) return std::string(text);
    return "\x1b[" + std::string(code) + "m" + std::string(text) + "\x1b[0m";
  }
};

}  // namespace loadstone
