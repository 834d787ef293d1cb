#include "plan/devices.h"

#include <algorithm>

#include "base/text.h"
#include "base/unknown_word.h"

namespace loadstone {

namespace {

constexpr std::size_t index_digits_max = 4;
constexpr std::size_t file_name_bytes_max = 255 - 4;  // ".dat"

bool is_number(std::string_view text) noexcept {
  return text.size() <= index_digits_max && is_digits(text);
}

}  // namespace

std::string device_name(std::string_view text) {
  return (is_number(text) ? "cuda:" : "") + std::string(text);
}

bool is_device_name(std::string_view text) noexcept {
  static constexpr std::array<std::string_view, 3> plain = {"cpu", "disk", "meta"};
  if (std::ranges::find(plain, text) != plain.end()) return true;
  const auto colon = text.find(':');
  if (std::ranges::count(counted_devices, text.substr(0, colon)) == 0) return false;
  return colon == std::string_view::npos || is_number(text.substr(colon + 1));
}

std::string unknown_device(std::string_view text, std::vector<std::string> others) {
  others.insert(others.end(), {"cpu", "disk", "meta", "cuda:0"});
  others.insert(others.end(), counted_devices.begin(), counted_devices.end());
  return unknown_word("device", text, others);
}

bool is_offload_name(std::string_view name) noexcept {
  if (name.empty() || name.size() > file_name_bytes_max || name == "." || name == "..")
    return false;
  return std::ranges::none_of(name, [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte < 0x20 || byte == 0x7f || c == '/' || c == '\\';
  });
}

}  // namespace loadstone
