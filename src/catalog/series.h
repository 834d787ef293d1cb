// Series: tensors that are told apart by a number in their names, such as the experts of a layer.
// A series has partners (gate, up and down), and each partner has one tensor of each number.
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
  std::string_view number;  // as its name spells it
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
  std::uint64_t absent_count = 0;  // all of them
  // Members whose number is none of the series: with leading zeros, given twice, or larger than so
  // few tensors can be numbered. Indices, in order.
  std::vector<std::size_t> stray;

  [[nodiscard]] bool ok() const noexcept { return absent_count == 0 && stray.empty(); }
};

// Demands beyond the rule below.
struct SeriesWish {
  std::uint64_t count = 0;  // so many numbers at least; 0: as many as there are
  std::uint64_t first = 0;  // where numbers begin
};

// The number that a text is in its only spelling: digits, no leading zeros. Nothing for others, and
// above 10^18.
[[nodiscard]] std::optional<std::uint64_t> series_number(std::string_view text) noexcept;

// How many absent tensors are listed for a series of so many.
[[nodiscard]] constexpr std::uint64_t series_listed_max(std::size_t members) noexcept {
  return 16 + 2 * std::uint64_t{members};
}

// The one rule for every series: all partners have the same numbers, 0 to n - 1 without gaps, each
// once and in its only spelling. Time and memory grow with the members, never with a number that a
// name claims.
[[nodiscard]] SeriesCheck check_series(std::span<const SeriesMember> members,
                                       std::uint32_t partners, const SeriesWish& wish = {});

}  // namespace loadstone
