// Finds scales of whole matrices with which their parts are exact. A part is a value of `fp8`, or a
// block of `nvfp4`, whose own scale is a code.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace loadstone {

// The scales with which the parts of a matrix are F8_E4M3 codes times the scale. A scale that fits
// also fits at half its size while the codes stay in range, so the set consists of significands.
// Parts can be added, and sets joined, in any order. Value type.
class ExactScales {
 public:
  // Adds values, each of which should be a code times the scale.
  void add_values(std::span<const float> values) noexcept;
  // Adds a block of E2M1 codes, whose scale should be a code times the scale of the matrix.
  void add_block(std::span<const float> values) noexcept;
  void join(const ExactScales& other) noexcept;

  // Returns the smallest scale with which 448 reaches `largest` and all parts; 0 if no scale fits.
  // `needs_all`: 0 unless all parts are exact.
  [[nodiscard]] float scale(float largest, bool needs_all) const noexcept;

 private:
  struct Candidate {
    float significand = 0;  // in [1, 2)
    float top = 0;          // the largest part
    int low = 0;  // exponent of the lowest bit of all codes, if the scale is `significand`
  };
  // The numbers that must be a code times the scale. One of them is enough.
  using Part = std::span<const float>;

  void add(Part part) noexcept;
  void begin(Part part) noexcept;
  // Adds a part to a candidate. Returns false if the part does not fit.
  [[nodiscard]] static bool fit(Part part, Candidate& candidate) noexcept;

  // A block fits at most 6 scales, each of which is a code times at most 24 scales of the matrix.
  static constexpr std::uint32_t candidates_max = 144;
  std::array<Candidate, candidates_max> candidates_{};
  std::uint32_t count_ = 0;
  bool has_parts_ = false;
  bool has_all_ = true;  // false if a part was left out, because it fits no scale
};

}  // namespace loadstone
