// Checks series: tensors distinguished by a number in their names, such as the experts of a layer.
// A series has partners (gate, up and down), and each partner has one tensor per number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace loadstone {

// One tensor of a series.
struct SeriesMember {
  std::uint32_t partner = 0;
  std::string_view number;  // as spelled in the tensor's name
};

// A tensor that a series lacks.
struct SeriesGap {
  std::uint32_t partner = 0;
  std::uint64_t number = 0;

  friend bool operator==(const SeriesGap&, const SeriesGap&) = default;
};

struct SeriesCheck {
  std::uint64_t end = 0;           // one more than the last number
  std::vector<SeriesGap> absent;   // by number, then by partner; the first series_listed_max()
  std::uint64_t absent_count = 0;  // number of all missing tensors
  // Indices, in order, of members with an invalid number: with leading zeros, repeated, or larger
  // than the number of tensors allows.
  std::vector<std::size_t> stray;

  [[nodiscard]] bool ok() const noexcept { return absent_count == 0 && stray.empty(); }
};

// Requirements in addition to the rule of check_series().
struct SeriesWish {
  std::uint64_t count = 0;  // expected minimum; 0: the actual count
  std::uint64_t first = 0;  // the first number
};

// Parses digits without leading zeros, the only valid spelling of a number. Returns nullopt for
// other texts, and for more than 18 digits.
[[nodiscard]] std::optional<std::uint64_t> series_number(std::string_view text) noexcept;

// Returns the maximum number of missing tensors to list for a series of this size.
[[nodiscard]] constexpr std::uint64_t series_listed_max(std::size_t members) noexcept {
  return 16 + 2 * std::uint64_t{members};
}

// Checks the rule for every series: all partners have the same numbers, 0 to n - 1 without gaps,
// each once and in its only spelling. Time and memory grow with the number of members, never with a
// number in a name.
[[nodiscard]] SeriesCheck check_series(std::span<const SeriesMember> members,
                                       std::uint32_t partners, const SeriesWish& wish = {});

}  // namespace loadstone
