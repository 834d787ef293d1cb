// Describes the values that an encoding can represent. From two descriptions follows whether values
// survive a change of encoding.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "loadstone/dtype.h"
#include "loadstone/quantization.h"

namespace loadstone {

// The order of computing a value from its code and scale, which determines the rounding in F32.
enum class BlockProduct : std::uint8_t {
  code_times_scale,
  code_over_scale,
  twice  // (code * scale) * scale of the tensor
};

// The values of a quantized tensor: codes, and one scale per block. Value type.
struct BlockGrid {
  std::span<const float> codes;  // sorted; static storage
  // The codes if all zero points are in the middle, as in symmetric encodings that store zero
  // points. Empty for encodings without zero points.
  std::span<const float> symmetric_codes{};
  // Dtype of the scales. F8_E4M3: scales are codes themselves, times a scale of the matrix.
  Dtype scale = Dtype::f32;
  BlockProduct product = BlockProduct::code_times_scale;
  bool divides_scales = false;     // F8_E4M3: the scale of the matrix divides the others
  bool has_signed_scales = false;  // true if encoders may write negative scales
  std::uint64_t rows = 1;          // of a block; may exceed those of the matrix
  std::uint64_t columns = 1;
  // Each block also has a minimum of the scale's dtype, which is added: the codes are 0, 1 ...
  bool has_minimum = false;
  bool is_flat = false;      // blocks of `columns` values run across rows
  bool gives_codes = false;  // true if the decoder has Decoder::take_codes()
};

// ---- Sets of codes

[[nodiscard]] std::span<const float> integer_codes(int least, int most) noexcept;
// Returns the finite values of F8_E4M3 or F8_E5M2. Returns an empty set for other dtypes.
[[nodiscard]] std::span<const float> float_codes(Dtype dtype) noexcept;

inline constexpr std::array<float, 15> e2m1_codes = {-6,  -4, -3,  -2, -1.5, -1, -0.5, 0,
                                                     0.5, 1,  1.5, 2,  3,    4,  6};

// ----

// Returns true if the codes of `from`, times a constant, are codes of `to`. If `to` has minima, a
// constant may also be added.
[[nodiscard]] bool contains_codes(const BlockGrid& to, const BlockGrid& from);

// Returns true if both have the same codes and the same arithmetic, so that a code can be moved if
// the new encoding can represent its scale.
[[nodiscard]] bool has_same_codes(const BlockGrid& to, const BlockGrid& from);

// Returns true if the codes of `from`, times a constant, are codes of `to`, and most of them are
// codes at twice that size too, so that blocks of different scales can share one.
[[nodiscard]] bool has_headroom(const BlockGrid& to, const BlockGrid& from);

// `is_within`: each block of `to` is part of one block of `from`.
// `shares`: a scale of `to` also depends on other values than those of one matrix of `from`.
// Precondition: contains_codes(to, from).
[[nodiscard]] Fidelity fidelity_of_scales(const BlockGrid& from, const BlockGrid& to,
                                          bool is_within, bool shares);

// ---- Scales in F8_E4M3 with a scale of the matrix

// Returns a divisor for which, for every scale in F8_E4M3, division gives the same F32 as
// multiplication by `factor`; nullopt if there is no such divisor. same_factor() is its inverse.
[[nodiscard]] std::optional<float> same_divisor(float factor) noexcept;
[[nodiscard]] std::optional<float> same_factor(float divisor) noexcept;
// Returns the largest relative change of a scale in F8_E4M3 that is divided by `divisor` instead of
// multiplied by `factor`.
[[nodiscard]] double change_of_scales(float factor, float divisor) noexcept;

}  // namespace loadstone
