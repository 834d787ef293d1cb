// Reads a fuzzer's bytes as a sequence of decisions.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

namespace loadstone::fuzz {

// At most one argument of a call may read a decision, because C++ does not specify the evaluation
// order of arguments. After the last byte every decision is 0, so each prefix of an input is a
// valid input, and a mutation changes few decisions. Not thread-safe.
class Input {
 public:
  explicit Input(std::span<const std::uint8_t> bytes) : rest_(bytes) {}

  [[nodiscard]] bool is_empty() const noexcept { return rest_.empty(); }

  std::uint8_t byte() {
    if (rest_.empty()) return 0;
    const std::uint8_t first = rest_.front();
    rest_ = rest_.subspan(1);
    return first;
  }
  std::uint64_t number() {
    std::uint64_t number = 0;
    for (int shift = 0; shift < 32; shift += 8) number |= std::uint64_t{byte()} << shift;
    return number;
  }
  // Returns a number below `bound`, from one byte if the bound is at most 256.
  std::uint64_t below(std::uint64_t bound) {
    return bound == 0 ? 0 : (bound <= 256 ? byte() : number()) % bound;
  }
  // Returns true in `percent` of all cases, and false after the end of the input.
  bool chance(unsigned percent) { return byte() % 100u >= 100u - percent; }
  // Returns the next bytes, which may be fewer at the end of the input.
  std::string text(std::size_t bytes) {
    const auto taken = rest_.first(std::min(bytes, rest_.size()));
    rest_ = rest_.subspan(taken.size());
    return {taken.begin(), taken.end()};
  }
  template <typename Items>
  [[nodiscard]] auto pick(const Items& items) -> decltype(items[0]) {
    return items[below(std::size(items))];
  }

  // Returns a value near limits at which sizes and offsets overflow.
  std::uint64_t large_number() {
    static constexpr auto numbers = std::to_array<std::uint64_t>({0,
                                                                  1,
                                                                  2,
                                                                  3,
                                                                  8,
                                                                  15,
                                                                  16,
                                                                  64,
                                                                  127,
                                                                  128,
                                                                  255,
                                                                  256,
                                                                  4096,
                                                                  65536,
                                                                  INT32_MAX,
                                                                  UINT32_MAX,
                                                                  std::uint64_t{1} << 32,
                                                                  std::uint64_t{1} << 40,
                                                                  std::uint64_t{1} << 62,
                                                                  INT64_MAX,
                                                                  std::uint64_t{1} << 63,
                                                                  UINT64_MAX});
    return numbers[below(numbers.size())];
  }

 private:
  std::span<const std::uint8_t> rest_;
};

}  // namespace loadstone::fuzz
