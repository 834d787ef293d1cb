// Encodes and decodes nf4 and fp4: blocks of values that share a scale, with two codes per byte,
// the first code in the high bits.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "kernels/bnb.h"
#include "kernels/bnb/tables.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/bnb/four_bit.cpp"
#include <hwy/foreach_target.h>
// Highway requires this include after foreach_target.h.
#include <hwy/highway.h>

#include "kernels/numbers_inl.h"

#ifndef LOADSTONE_KERNELS_BNB_FOUR_BIT_ONCE
#define LOADSTONE_KERNELS_BNB_FOUR_BIT_ONCE

namespace loadstone::simd {

// Returns the code of a value that is already divided by its block's scale, finite or not.
inline unsigned code_of(float scaled, const Ranks& ranks, BnbDialect dialect) noexcept {
  if (scaled != scaled) return dialect == BnbDialect::cpu ? ranks.codes[15] : 0u;
  std::size_t rank = 0;
  for (const float threshold : ranks.thresholds) rank += scaled > threshold ? 1u : 0u;
  return ranks.codes[rank];
}

// The factor or divisor that scales the values of one block.
struct BlockScale {
  float factor = 0;   // multiplies each value
  float divisor = 0;  // if not 0, divides each value instead
  float stored = 0;
};

inline BlockScale block_scale(float absmax, bool is_short, BnbDialect dialect) noexcept {
  if (absmax != absmax) absmax = std::bit_cast<float>(quiet_nan_bits);
  if (dialect == BnbDialect::cuda) return {.factor = 1.0f / absmax, .stored = absmax};
  constexpr float least = 1e-38f;
  const float clamped = absmax < least ? least : absmax;
  if (is_short) return {.divisor = clamped, .stored = clamped};
  return {.factor = 1.0f / clamped, .stored = absmax};
}

// Encodes one value at a time, for short blocks and blocks with NaNs.
template <Dtype source>
void encode_plainly(const Ranks& ranks, BnbDialect dialect, const BlockScale& scale,
                    const std::byte* from, std::uint64_t count, std::byte* to) noexcept {
  const auto code_at = [&](std::uint64_t i) {
    float scaled = 0;
    if (i < count) {
      const float value = number::load<source>(from + i * number::bytes_of<source>);
      scaled = scale.divisor != 0 ? value / scale.divisor : value * scale.factor;
    }
    return code_of(scaled, ranks, dialect);
  };
  for (std::uint64_t i = 0; i < count; i += 2) {
    to[i / 2] = static_cast<std::byte>(code_at(i) << 4 | code_at(i + 1));
  }
}

}  // namespace loadstone::simd
#endif

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

using VI = hn::Vec<I32>;

// ---- encoding

// True if one vector holds a table of 8 floats, for vector widths known at compile time.
constexpr bool holds_tables = HWY_MAX_BYTES == 32 || HWY_MAX_BYTES == 64;

// Finds codes by bisection: each step looks up the middle one of the remaining thresholds.
class Bisection {
 public:
  HWY_INLINE explicit Bisection(const Ranks& ranks) {
    const auto& t = ranks.thresholds;
    first_ = t[7];
    fill(second_, {t[3], t[11]});
    fill(third_, {t[1], t[5], t[9], t[13]});
    fill(fourth_, {t[0], t[2], t[4], t[6], t[8], t[10], t[12], t[14]});
    for (std::size_t i = 0; i < 8; ++i) {
      below_[i] = ranks.codes[2 * i];
      above_[i] = ranks.codes[2 * i + 1];
    }
  }

  template <int shift>
  HWY_INLINE VI codes(VF scaled) const {
    VI place = hn::Neg(above(scaled, hn::Set(F32(), first_)));
    place = step(scaled, look_up(second_, place), place);
    place = step(scaled, look_up(third_, place), place);
    const auto is_above = hn::Gt(scaled, look_up(fourth_, place));
    const auto codes = hn::IfThenElse(hn::RebindMask(I32(), is_above), look_up(above_, place),
                                      look_up(below_, place));
    return hn::ShiftLeft<shift>(codes);
  }

 private:
  using Floats = std::array<float, 16>;
  using Codes = std::array<std::int32_t, 16>;

  static HWY_INLINE void fill(Floats& table, std::initializer_list<float> values) {
    std::ranges::copy(values, table.begin());
  }
  // Returns -1 in lanes where `scaled` is above `threshold`, 0 in others.
  static HWY_INLINE VI above(VF scaled, VF threshold) {
    return hn::BitCast(I32(), hn::VecFromMask(F32(), hn::Gt(scaled, threshold)));
  }
  static HWY_INLINE VI step(VF scaled, VF threshold, VI place) {
    return hn::Sub(hn::Add(place, place), above(scaled, threshold));
  }
  static HWY_INLINE VF look_up(const Floats& table, VI place) {
    return hn::TableLookupLanes(hn::Load(F32(), table.data()), hn::IndicesFromVec(F32(), place));
  }
  static HWY_INLINE VI look_up(const Codes& table, VI place) {
    return hn::TableLookupLanes(hn::Load(I32(), table.data()), hn::IndicesFromVec(I32(), place));
  }

  float first_ = 0;
  alignas(64) Floats second_{};
  alignas(64) Floats third_{};
  alignas(64) Floats fourth_{};
  alignas(64) Codes below_{};
  alignas(64) Codes above_{};
};

// Finds codes by comparing with all thresholds, for vectors that are too short for Bisection.
class Counting {
 public:
  HWY_INLINE explicit Counting(const Ranks& ranks) : ranks_(ranks) {}

  template <int shift>
  HWY_INLINE VI codes(VF scaled) const {
    VI codes = hn::Set(I32(), ranks_.codes[0]);
    for (std::size_t i = 0; i < 15; ++i) {
      const auto is_above = hn::Gt(scaled, hn::Set(F32(), ranks_.thresholds[i]));
      codes = hn::IfThenElse(hn::RebindMask(I32(), is_above), hn::Set(I32(), ranks_.codes[i + 1]),
                             codes);
    }
    return hn::ShiftLeft<shift>(codes);
  }

 private:
  const Ranks& ranks_;
};

// Encodes a whole block of finite scaled values.
template <Dtype source, class Search>
HWY_INLINE void encode_block(const Search& search, float factor, const std::byte* from,
                             std::size_t count, std::byte* to) {
  const VF factors = hn::Set(F32(), factor);
  const std::size_t lanes = hn::Lanes(F32());
  for (std::size_t i = 0; i < count; i += 2 * lanes) {
    VF even;
    VF odd;
    load_pairs<source>(from + i * number::bytes_of<source>, even, odd);
    const VI high = search.template codes<4>(hn::Mul(even, factors));
    const VI low = search.template codes<0>(hn::Mul(odd, factors));
    store_bits(U8(), hn::DemoteTo(U8(), hn::Or(high, low)), to + i / 2);
  }
}

template <Dtype source, class Search>
std::uint64_t encode_blocks(const Bnb4& form, const std::byte* from, std::uint64_t count,
                            std::byte* to, std::byte* absmax) {
  const Ranks& ranks = ranks_of(form);
  const Search search(ranks);
  std::uint64_t first_wrong = count;
  for (std::uint64_t at = 0; at < count; at += form.block_size) {
    const std::uint64_t size = std::min<std::uint64_t>(form.block_size, count - at);
    const bool is_short = size < form.block_size;
    const std::byte* const numbers = from + at * number::bytes_of<source>;
    const float most = largest_magnitude<source>(numbers, size);
    if (HWY_UNLIKELY(!is_finite_number(most)) && first_wrong == count) {
      first_wrong = at + find_number<source>(numbers, size,
                                             [](float value) { return !is_finite_number(value); });
    }
    const BlockScale scale = block_scale(most, is_short, form.dialect);
    number::store_raw(absmax + at / form.block_size * 4, scale.stored);
    if (HWY_UNLIKELY(is_short || !is_finite_number(most) || !is_finite_number(scale.factor))) {
      encode_plainly<source>(ranks, form.dialect, scale, numbers, size, to + at / 2);
    } else {
      encode_block<source>(search, scale.factor, numbers, size, to + at / 2);
    }
  }
  return first_wrong;
}

std::uint64_t Encode(const Bnb4& form, Dtype source, const std::byte* from, std::uint64_t count,
                     std::byte* to, std::byte* absmax) {
  using Search = std::conditional_t<holds_tables, Bisection, Counting>;
  return with_numbers(source, [&]<Dtype dtype>() {
    return encode_blocks<dtype, Search>(form, from, count, to, absmax);
  });
}

// ---- Decoding: looks up each code in a table of the block's 16 values

template <Dtype target>
struct BlockTable {
  alignas(64) std::array<number::Raw<target>, 16> numbers;

  HWY_INLINE BlockTable(const std::array<float, 16>& values, float absmax) {
    using Write = FiniteWriter<target>;
    auto* const to = reinterpret_cast<std::byte*>(numbers.data());
    if (HWY_UNLIKELY(!is_finite_number(absmax))) {
      for (std::size_t i = 0; i < 16; ++i) {
        store_number<target>(to + i * Write::bytes, values[i] * absmax);
      }
      return;
    }
    const VF factors = hn::Set(F32(), absmax);
    for (std::size_t i = 0; i < 16; i += hn::Lanes(F32())) {
      const VF products = hn::Mul(hn::LoadU(F32(), values.data() + i), factors);
      Write::write(hn::BitCast(U32(), products), to + i * Write::bytes);
    }
  }

  HWY_INLINE void write(unsigned code, std::byte* to) const {
    number::store_raw(to, numbers[code]);
  }
};

// Returns the 32 codes of 16 bytes in order, one code per byte.
#if HWY_TARGET != HWY_SCALAR
using Bytes32 = hn::CappedTag<std::uint8_t, 32>;
HWY_INLINE hn::Vec<Bytes32> codes_in_bytes(const std::byte* from) {
  const hn::Repartition<std::uint16_t, Bytes32> pairs;
  const hn::Rebind<std::uint8_t, decltype(pairs)> packed;
  const auto wide =
      hn::PromoteTo(pairs, hn::LoadU(packed, reinterpret_cast<const std::uint8_t*>(from)));
  const auto low = hn::And(hn::ShiftLeft<8>(wide), hn::Set(pairs, 0x0f00));
  return hn::BitCast(Bytes32(), hn::Or(hn::ShiftRight<4>(wide), low));
}
#endif

// Looks up 16-bit values in two tables, one of their low bytes and one of their high bytes.
template <Dtype target>
HWY_INLINE std::uint64_t look_up_halves(const BlockTable<target>& table, const std::byte* from,
                                        std::uint64_t count, std::byte* to) {
#if HWY_TARGET == HWY_SCALAR
  (void)table, (void)from, (void)count, (void)to;
  return 0;
#else
  const hn::FixedTag<std::uint8_t, 16> d16;
  alignas(16) std::array<std::uint8_t, 16> low_bytes;
  alignas(16) std::array<std::uint8_t, 16> high_bytes;
  const auto* const halves = reinterpret_cast<const std::uint8_t*>(table.numbers.data());
  const auto first = hn::Load(d16, halves);
  const auto second = hn::Load(d16, halves + 16);
  hn::Store(hn::ConcatEven(d16, second, first), d16, low_bytes.data());
  hn::Store(hn::ConcatOdd(d16, second, first), d16, high_bytes.data());
  const Bytes32 d;
  const auto low_table = hn::LoadDup128(d, low_bytes.data());
  const auto high_table = hn::LoadDup128(d, high_bytes.data());
  const std::size_t lanes = hn::Lanes(d);
  std::uint64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto codes = codes_in_bytes(from + i / 2);
    hn::StoreInterleaved2(hn::TableLookupBytes(low_table, codes),
                          hn::TableLookupBytes(high_table, codes), d,
                          reinterpret_cast<std::uint8_t*>(to) + 2 * i);
  }
  return i;
#endif
}

// Looks up 32-bit values, with vectors that fit at least 8 of the 16 table entries.
HWY_INLINE std::uint64_t look_up_singles(const BlockTable<Dtype::f32>& table, const std::byte* from,
                                         std::uint64_t count, std::byte* to) {
#if HWY_MAX_BYTES == 32 || HWY_MAX_BYTES == 64
  const std::size_t lanes = hn::Lanes(F32());
  const auto half = hn::Load(F32(), table.numbers.data());
  const auto other = hn::Load(F32(), table.numbers.data() + 16 - lanes);
  const auto last = hn::Set(I32(), static_cast<std::int32_t>(lanes - 1));
  std::uint64_t i = 0;
  alignas(64) std::array<std::uint8_t, 32> codes;
  for (; i + 32 <= count; i += 32) {
    hn::Store(codes_in_bytes(from + i / 2), Bytes32(), codes.data());
    for (std::size_t k = 0; k < 32; k += lanes) {
      const VI place = hn::PromoteTo(I32(), hn::Load(U8(), codes.data() + k));
      const auto inside = hn::IndicesFromVec(F32(), hn::And(place, last));
      VF numbers = hn::TableLookupLanes(half, inside);
      if (lanes < 16) {
        const auto is_other = hn::RebindMask(F32(), hn::Gt(place, last));
        numbers = hn::IfThenElse(is_other, hn::TableLookupLanes(other, inside), numbers);
      }
      store_bits(U32(), hn::BitCast(U32(), numbers), to + (i + k) * 4);
    }
  }
  return i;
#else
  (void)table, (void)from, (void)count, (void)to;
  return 0;
#endif
}

// Decodes values of one block, starting at an even index.
template <Dtype target>
HWY_INLINE void decode_run(const BlockTable<target>& table, const std::byte* from,
                           std::uint64_t count, std::byte* to) {
  std::uint64_t i = 0;
  if constexpr (target == Dtype::f32) {
    i = look_up_singles(table, from, count, to);
  } else {
    i = look_up_halves<target>(table, from, count, to);
  }
  for (; i < count; ++i) {
    const auto byte = std::to_integer<unsigned>(from[i / 2]);
    table.write(i % 2 == 0 ? byte >> 4 : byte & 15u, to + i * number::bytes_of<target>);
  }
}

template <Dtype target>
void decode_blocks(const Bnb4& form, std::uint64_t begin, std::uint64_t end, const std::byte* data,
                   const std::byte* absmax, std::byte* to) {
  const std::uint64_t first_byte = begin / 2;
  const std::uint64_t first_block = begin / form.block_size;
  for (std::uint64_t at = begin; at < end;) {
    const std::uint64_t block = at / form.block_size;
    const std::uint64_t block_end = std::min(end, (block + 1) * form.block_size);
    const BlockTable<target> table(codebook(form.code),
                                   number::load_raw<float>(absmax + (block - first_block) * 4));
    if (at % 2 != 0) {
      table.write(std::to_integer<unsigned>(data[at / 2 - first_byte]) & 15u, to);
      to += number::bytes_of<target>;
      ++at;
    }
    decode_run<target>(table, data + (at / 2 - first_byte), block_end - at, to);
    to += (block_end - at) * number::bytes_of<target>;
    at = block_end;
  }
}

void Decode(const Bnb4& form, std::uint64_t begin, std::uint64_t end, const std::byte* data,
            const std::byte* absmax, Dtype target, std::byte* to) {
  return with_numbers(target, [&]<Dtype dtype>() {
    return decode_blocks<dtype>(form, begin, end, data, absmax, to);
  });
}

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace loadstone::simd {

HWY_EXPORT(Encode);
HWY_EXPORT(Decode);

std::uint64_t encode_4bit(const Bnb4& form, Dtype source, const std::byte* numbers,
                          std::uint64_t count, std::byte* data, std::byte* absmax) noexcept {
  return HWY_DYNAMIC_DISPATCH(Encode)(form, source, numbers, count, data, absmax);
}

void decode_4bit(const Bnb4& form, std::uint64_t begin, std::uint64_t end, const std::byte* data,
                 const std::byte* absmax, Dtype target, std::byte* numbers) noexcept {
  HWY_DYNAMIC_DISPATCH(Decode)(form, begin, end, data, absmax, target, numbers);
}

}  // namespace loadstone::simd

namespace loadstone {

bool is_bnb_block_size(std::uint64_t size) noexcept {
  return std::has_single_bit(size) && size >= 32 && size <= 4096;
}

std::span<const float, 16> bnb4_values(Bnb4Code code) noexcept { return simd::codebook(code); }

std::uint64_t encode_bnb4(const Bnb4& form, Dtype source, const std::byte* numbers,
                          std::uint64_t count, std::byte* data, std::byte* absmax) noexcept {
  return simd::encode_4bit(form, source, numbers, count, data, absmax);
}

void decode_bnb4(const Bnb4& form, std::uint64_t begin, std::uint64_t end, const std::byte* data,
                 const std::byte* absmax, Dtype target, std::byte* numbers) noexcept {
  simd::decode_4bit(form, begin, end, data, absmax, target, numbers);
}

}  // namespace loadstone
#endif
