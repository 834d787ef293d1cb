// Encodes Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0. The scale follows from the extreme values of a block of
// 32.
#include <array>
#include <limits>

#include "kernels/gguf/codes.h"
#include "kernels/gguf/families.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gguf/encode_legacy.cpp"
#include <hwy/foreach_target.h>
// Highway requires this include after foreach_target.h.
#include <hwy/highway.h>

#include "kernels/gguf/groups_inl.h"

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

inline constexpr std::size_t legacy_elements = 32;

using Codes32 = std::array<std::uint8_t, legacy_elements>;

HWY_INLINE float reciprocal(float scale) { return scale != 0 ? 1.0f / scale : 0.0f; }

// Returns false if all codes must be 0 because the scale or its inverse is infinite or NaN. Then
// products are infinite or NaN, and ggml on x86-64 converts them to integers whose stored bits are
// 0.
HWY_INLINE bool is_usable(float scale, float inverse) {
  return is_finite_number(scale) && is_finite_number(inverse);
}

// Returns the first value with the largest magnitude.
HWY_INLINE float extreme(const float* numbers) {
  const F32 d;
  VF most = hn::Zero(d);
  for (std::size_t i = 0; i < legacy_elements; i += hn::Lanes(d)) {
    most = hn::Max(most, hn::Abs(hn::LoadU(d, numbers + i)));
  }
  const float magnitude = hn::GetLane(hn::MaxOfLanes(d, most));
  if (magnitude == 0) return 0.0f;
  for (std::size_t i = 0; i < legacy_elements; i += hn::Lanes(d)) {
    const auto is_most = hn::Eq(hn::Abs(hn::LoadU(d, numbers + i)), hn::Set(d, magnitude));
    const std::intptr_t place = hn::FindFirstTrue(d, is_most);
    if (place >= 0) return numbers[i + static_cast<std::size_t>(place)];
  }
  return magnitude;
}

struct Limits {
  float least;
  float most;
};

HWY_INLINE Limits limits_of(const float* numbers) {
  const F32 d;
  VF least = hn::LoadU(d, numbers);
  VF most = least;
  for (std::size_t i = hn::Lanes(d); i < legacy_elements; i += hn::Lanes(d)) {
    const VF values = hn::LoadU(d, numbers + i);
    least = hn::Min(least, values);
    most = hn::Max(most, values);
  }
  Limits limits = {hn::GetLane(hn::MinOfLanes(d, least)), hn::GetLane(hn::MaxOfLanes(d, most))};
  if (limits.least == 0) {  // the format stores the sign of the first zero
    std::size_t i = 0;
    while (numbers[i] != 0) ++i;
    limits.least = numbers[i];
    if (limits.most == 0) limits.most = limits.least;
  }
  return limits;
}

// Computes (number - less) * factor + half, truncated to an integer of at most `top`.
HWY_INLINE void cut_codes(const float* numbers, float less, float factor, float half, int top,
                          Codes32& codes) {
  const F32 d;
  for (std::size_t i = 0; i < legacy_elements; i += hn::Lanes(d)) {
    const VF scaled =
        hn::Mul(hn::Sub(hn::LoadU(d, numbers + i), hn::Set(d, less)), hn::Set(d, factor));
    const auto integers = hn::ConvertTo(I32(), hn::Add(scaled, hn::Set(d, half)));
    store_codes(hn::Min(integers, hn::Set(I32(), top)), codes.data() + i);
  }
}

// Packs 32 codes into 16 bytes. The first 16 codes are the low halves of the bytes.
HWY_INLINE void pack_halves(const Codes32& codes, std::byte* to) {
  for (std::size_t i = 0; i < 16; i += 8) {
    const std::uint64_t low = eight_codes(codes.data() + i);
    const std::uint64_t high = eight_codes(codes.data() + 16 + i);
    number::store_raw(to + i, (low & each_byte(15)) | (high & each_byte(15)) << 4);
  }
}

HWY_INLINE void pack_fifths(const Codes32& codes, std::byte* to) {
  for (std::size_t i = 0; i < 4; ++i) {
    to[i] = gathered_bits(eight_codes(codes.data() + 8 * i) >> 4);
  }
}

// Encodes with codes around `middle`. The value with the largest magnitude gets code 0.
template <int middle>
HWY_INLINE float encode_around(const float* numbers, Codes32& codes) {
  const float scale = extreme(numbers) / -middle;
  const float inverse = reciprocal(scale);
  codes.fill(0);
  if (is_usable(scale, inverse)) {
    cut_codes(numbers, 0.0f, inverse, middle + 0.5f, 2 * middle - 1, codes);
  }
  return scale;
}

// Encodes with codes from the least value up. Stores the scale and the least value.
template <int top>
HWY_INLINE void encode_above(const float* numbers, std::byte* block, Codes32& codes) {
  const Limits limits = limits_of(numbers);
  const float scale = (limits.most - limits.least) / top;
  const float inverse = reciprocal(scale);
  codes.fill(0);
  if (is_usable(scale, inverse)) cut_codes(numbers, limits.least, inverse, 0.5f, top, codes);
  store_f16(block, scale);
  store_f16(block + 2, limits.least);
}

// A format has these members:
//   block_bytes, encode(values, block)
//   is_searched              true if values with an importance need a search; then also:
//   top                      the largest code
//   has_minimum              true if the format stores the least value
//   pack(codes, block)       stores the codes, but not the scale
struct ToQ4_0 {
  static constexpr std::size_t block_bytes = 18;
  static constexpr int top = 15;
  static constexpr bool is_searched = true;
  static constexpr bool has_minimum = false;
  static HWY_INLINE void pack(const Codes32& codes, std::byte* block) {
    pack_halves(codes, block + 2);
  }
  static HWY_INLINE void encode(const float* numbers, std::byte* block) {
    Codes32 codes;
    store_f16(block, encode_around<8>(numbers, codes));
    pack(codes, block);
  }
};

struct ToQ4_1 {
  static constexpr std::size_t block_bytes = 20;
  static constexpr int top = 15;
  static constexpr bool is_searched = true;
  static constexpr bool has_minimum = true;
  static HWY_INLINE void pack(const Codes32& codes, std::byte* block) {
    pack_halves(codes, block + 4);
  }
  static HWY_INLINE void encode(const float* numbers, std::byte* block) {
    Codes32 codes;
    encode_above<top>(numbers, block, codes);
    pack(codes, block);
  }
};

struct ToQ5_0 {
  static constexpr std::size_t block_bytes = 22;
  static constexpr int top = 31;
  static constexpr bool is_searched = true;
  static constexpr bool has_minimum = false;
  static HWY_INLINE void pack(const Codes32& codes, std::byte* block) {
    pack_fifths(codes, block + 2);
    pack_halves(codes, block + 6);
  }
  static HWY_INLINE void encode(const float* numbers, std::byte* block) {
    Codes32 codes;
    store_f16(block, encode_around<16>(numbers, codes));
    pack(codes, block);
  }
};

struct ToQ5_1 {
  static constexpr std::size_t block_bytes = 24;
  static constexpr int top = 31;
  static constexpr bool is_searched = true;
  static constexpr bool has_minimum = true;
  static HWY_INLINE void pack(const Codes32& codes, std::byte* block) {
    pack_fifths(codes, block + 4);
    pack_halves(codes, block + 8);
  }
  static HWY_INLINE void encode(const float* numbers, std::byte* block) {
    Codes32 codes;
    encode_above<top>(numbers, block, codes);
    pack(codes, block);
  }
};

struct ToQ8_0 {
  static constexpr std::size_t block_bytes = 34;
  static constexpr bool is_searched = false;
  static HWY_INLINE void encode(const float* numbers, std::byte* block) {
    const F32 d;
    VF most = hn::Zero(d);
    for (std::size_t i = 0; i < legacy_elements; i += hn::Lanes(d)) {
      most = hn::Max(most, hn::Abs(hn::LoadU(d, numbers + i)));
    }
    const float scale = hn::GetLane(hn::MaxOfLanes(d, most)) / 127;
    const float inverse = reciprocal(scale);
    store_f16(block, scale);
    if (!is_usable(scale, inverse)) {
      std::memset(block + 2, 0, legacy_elements);
      return;
    }
    for (std::size_t i = 0; i < legacy_elements; i += hn::Lanes(d)) {
      const VF scaled = hn::Mul(hn::LoadU(d, numbers + i), hn::Set(d, inverse));
      store_codes(rounded_away(scaled), reinterpret_cast<std::int8_t*>(block) + 2 + i);
    }
  }
};

// ---- Values with an importance: searches the scales of 16 blocks at once, one block per lane

HWY_INLINE Codes32 codes_of_lane(const LaneCodes<legacy_elements>& codes, std::size_t lane) {
  Codes32 found;
  for (std::size_t i = 0; i < legacy_elements; ++i) found[i] = codes[i * lane_count + lane];
  return found;
}

// Computes code(value, lane) for each value.
template <class Code>
HWY_INLINE void store_searched(const LaneRows<legacy_elements>& rows, Code code,
                               LaneCodes<legacy_elements>& codes) {
  for (std::size_t lane = 0; lane < lane_count; lane += hn::Lanes(F32())) {
    for (std::size_t i = 0; i < legacy_elements; ++i) {
      const std::size_t at = i * lane_count + lane;
      store_codes(code(row_at(rows.data() + at), lane), codes.data() + at);
    }
  }
}

template <class Format>
struct WeightedGroup : Format {
  static constexpr std::size_t elements = legacy_elements;
  static constexpr std::size_t blocks = lane_count;

  static void encode(const GroupNumbers& group, std::byte* to) {
    alignas(64) LaneRows<elements> rows;
    alignas(64) LaneRows<elements> weights;
    alignas(64) LaneCodes<elements> codes;
    alignas(64) LaneNumbers means;
    Fitted fitted;
    means.fill(group.row_mean_square);
    spread_runs<elements>(group.numbers, order_of_runs, rows);
    spread_runs<elements>(group.importance, order_of_runs, weights);
    weigh_importance<elements>(rows, means, weights);
    if constexpr (Format::has_minimum) {
      fit_affine<WeightedSearch<elements, Format::top>>(rows, weights, fitted);
      store_searched(
          rows,
          [&](VF number, std::size_t lane) {
            return affine_code(number, row_at(fitted.code_scales.data() + lane),
                               row_at(fitted.code_minima.data() + lane), Format::top);
          },
          codes);
    } else {
      constexpr int middle = (Format::top + 1) / 2;
      fit_centered<elements, middle>(rows, weights, fitted);
      store_searched(
          rows,
          [&](VF number, std::size_t lane) {
            return stored_centered_code(number, row_at(fitted.code_scales.data() + lane), middle);
          },
          codes);
    }
    for (std::size_t lane = 0; lane < blocks; ++lane, to += Format::block_bytes) {
      store_f16(to, fitted.scales[lane]);
      if (Format::has_minimum) store_f16(to + 2, -fitted.minima[lane]);
      Format::pack(codes_of_lane(codes, lane), to);
    }
  }
};

template <class Format>
void encode_legacy(const float* numbers, std::uint64_t block_count,
                   const BlockImportance* importance, std::byte* blocks) noexcept {
  if constexpr (Format::is_searched) {
    if (importance != nullptr) {
      return encode_groups<WeightedGroup<Format>>(numbers, block_count, importance, blocks);
    }
  }
  for (std::uint64_t i = 0; i < block_count; ++i) {
    Format::encode(numbers + i * legacy_elements, blocks + i * Format::block_bytes);
  }
}

EncodeBlocks FindLegacyEncoder(BlockFormat format) {
  switch (format) {
    case BlockFormat::q4_0:
      return encode_legacy<ToQ4_0>;
    case BlockFormat::q4_1:
      return encode_legacy<ToQ4_1>;
    case BlockFormat::q5_0:
      return encode_legacy<ToQ5_0>;
    case BlockFormat::q5_1:
      return encode_legacy<ToQ5_1>;
    case BlockFormat::q8_0:
      return encode_legacy<ToQ8_0>;
    default:
      return nullptr;
  }
}

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace loadstone::simd {

HWY_EXPORT(FindLegacyEncoder);

EncodeBlocks legacy_encoder(BlockFormat format) noexcept {
  return HWY_DYNAMIC_DISPATCH(FindLegacyEncoder)(format);
}

}  // namespace loadstone::simd
#endif
