#include "base/base64.h"

#include <array>
#include <cstdint>

namespace loadstone {

namespace {

constexpr std::string_view base64_letters =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
constexpr std::uint8_t no_letter = 0xff;

constexpr std::array<std::uint8_t, 256> make_values() {
  std::array<std::uint8_t, 256> values = {};
  for (auto& value : values) value = no_letter;
  for (std::size_t i = 0; i < base64_letters.size(); ++i) {
    values[static_cast<unsigned char>(base64_letters[i])] = static_cast<std::uint8_t>(i);
  }
  return values;
}

constexpr auto values = make_values();

}  // namespace

std::string base64_from(std::span<const std::byte> bytes) {
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    const std::size_t count = bytes.size() - i < 3 ? bytes.size() - i : 3;
    std::uint32_t group = 0;
    for (std::size_t k = 0; k < 3; ++k) {
      group = group << 8 | (k < count ? std::to_integer<std::uint32_t>(bytes[i + k]) : 0);
    }
    for (std::size_t k = 0; k < 4; ++k) {
      text += k <= count ? base64_letters[group >> (18 - 6 * k) & 63u] : '=';
    }
  }
  return text;
}

std::optional<std::vector<std::byte>> bytes_from_base64(std::string_view text) {
  if (text.size() % 4 != 0) return std::nullopt;
  std::size_t padding = 0;
  while (padding < 2 && padding < text.size() && text[text.size() - 1 - padding] == '=') ++padding;
  std::vector<std::byte> bytes;
  bytes.reserve(text.size() / 4 * 3);
  for (std::size_t i = 0; i < text.size(); i += 4) {
    const std::size_t count = i + 4 == text.size() ? 4 - padding : 4;
    std::uint32_t group = 0;
    for (std::size_t k = 0; k < 4; ++k) {
      const std::uint8_t value =
          k < count ? values[static_cast<unsigned char>(text[i + k])] : std::uint8_t{0};
      if (value == no_letter) return std::nullopt;
      group = group << 6 | value;
    }
    // Unused bits must be 0, so that each byte sequence has exactly one encoding.
    if (count < 4 && (group & (count == 3 ? 0xffu : 0xffffu)) != 0) return std::nullopt;
    for (std::size_t k = 0; k + 1 < count; ++k) {
      bytes.push_back(static_cast<std::byte>(group >> (16 - 8 * k)));
    }
  }
  return bytes;
}

}  // namespace loadstone
