#include "catalog/series.h"

#include <algorithm>
#include <charconv>
#include <utility>

namespace loadstone {

namespace {

constexpr std::size_t digits_max = 18;
constexpr std::uint64_t wish_max =
    std::uint64_t{1} << 31;  // its product with the number of partners fits in 64 bits

// Fast path without allocations: returns true if the series is complete and its members are in
// order, as in nearly every file. False is inconclusive.
bool is_plainly_whole(std::span<const SeriesMember> members, std::uint32_t partners,
                      const SeriesWish& wish, SeriesCheck& check) {
  if (partners == 0 || members.size() % partners != 0) return false;
  const std::size_t count = members.size() / partners;
  if (count == 0 || count < wish.count) return false;
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (members[i].partner != i / count) return false;
    if (series_number(members[i].number) != wish.first + i % count) return false;
  }
  check.end = wish.first + count;
  return true;
}

using Numbered = std::pair<std::uint64_t, std::uint32_t>;  // number and partner

// Returns the members whose number can be in the series, sorted and without repetitions. Adds all
// other members to `check.stray`.
std::vector<Numbered> plausible(std::span<const SeriesMember> members, std::uint64_t first,
                                std::uint64_t limit, SeriesCheck& check) {
  std::vector<std::pair<Numbered, std::size_t>> all;
  all.reserve(members.size());
  for (std::size_t i = 0; i < members.size(); ++i) {
    const auto number = series_number(members[i].number);
    if (number && *number >= first && *number - first < limit) {
      all.push_back({{*number, members[i].partner}, i});
    } else {
      check.stray.push_back(i);
    }
  }
  std::ranges::sort(all);
  std::vector<Numbered> once;
  once.reserve(all.size());
  for (const auto& [numbered, index] : all) {
    if (once.empty() || once.back() != numbered) {
      once.push_back(numbered);
    } else {
      check.stray.push_back(index);
    }
  }
  std::ranges::sort(check.stray);
  return once;
}

}  // namespace

std::optional<std::uint64_t> series_number(std::string_view text) noexcept {
  if (text.empty() || text.size() > digits_max || (text.size() > 1 && text.front() == '0')) {
    return std::nullopt;
  }
  std::uint64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [after, problem] = std::from_chars(text.data(), end, number);
  if (problem != std::errc{} || after != end) return std::nullopt;
  return number;
}

SeriesCheck check_series(std::span<const SeriesMember> members, std::uint32_t partners,
                         const SeriesWish& wish) {
  SeriesCheck check;
  if (partners == 0 || is_plainly_whole(members, partners, wish, check)) return check;
  const std::uint64_t wanted = std::min(wish.count, wish_max);
  const std::uint64_t listed_max = series_listed_max(members.size());
  // A larger number would mean more absent than present tensors.
  const std::uint64_t limit = std::max(listed_max, wanted);
  const std::vector<Numbered> present = plausible(members, wish.first, limit, check);
  check.end = wish.first + wanted;
  if (!present.empty()) check.end = std::max(check.end, present.back().first + 1);
  check.absent_count = (check.end - wish.first) * partners - present.size();
  auto next = present.begin();
  for (std::uint64_t number = wish.first; number < check.end; ++number) {
    for (std::uint32_t partner = 0; partner < partners; ++partner) {
      if (check.absent.size() == std::min(check.absent_count, listed_max)) return check;
      if (next != present.end() && *next == Numbered{number, partner}) {
        ++next;
      } else {
        check.absent.push_back({partner, number});
      }
    }
  }
  return check;
}

}  // namespace loadstone
