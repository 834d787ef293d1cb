#include "base/version_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "base/digest.h"

namespace loadstone {

namespace {

bool has_only(std::string_view text, std::string_view characters) {
  return text.find_first_not_of(characters) == std::string_view::npos;
}

// Returns true for an HTTP date such as "Thu, 26 Nov 2026 06:53:47 GMT".
bool is_date(std::string_view text) {
  constexpr std::string_view sample = "Www, 00 Mmm 0000 00:00:00 GMT";
  constexpr std::string_view letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
  return std::ranges::equal(text, sample, [&](char found, char wanted) {
    if (wanted == '0') return found >= '0' && found <= '9';
    return letters.find(wanted) == letters.npos ? found == wanted
                                                : letters.find(found) != letters.npos;
  });
}

}  // namespace

std::string version_text(std::string_view version) {
  constexpr std::size_t shown_bytes_max = 200;
  if (version.empty()) return "no version";
  const bool is_plain = has_only(version, "0123456789abcdefxABCDEFXW/\"-.:") || is_date(version);
  if (is_plain && version.size() <= shown_bytes_max) return std::string(version);
  Digest digest;
  digest.update(std::as_bytes(std::span(version)));
  return fmt::format("a text whose digest is {}", digest.hex().substr(0, 16));
}

}  // namespace loadstone
