// Number types, block formats and the two together: an encoding.
//
// A dtype is a plain number type; a block format (Q4_K and its like) packs a fixed number of
// elements into a fixed number of bytes together with their scales. What a tensor in a shard has is
// an Encoding: one or the other. A target always has a Dtype.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "loadstone/export.h"

namespace loadstone {

enum class Dtype : std::uint8_t {
  boolean,
  u8,
  i8,
  u16,
  i16,
  u32,
  i32,
  u64,
  i64,
  f16,
  bf16,
  f32,
  f64,
  c64,
  f8_e4m3,
  f8_e5m2,
  f8_e8m0,
  f8_e4m3fnuz,
  f8_e5m2fnuz,
  f6_e2m3,
  f6_e3m2,
  f4,
  c128,  // of torch files and constructors: safetensors and GGUF do not have it
};

enum class DtypeKind : std::uint8_t { boolean, integer, floating, complex };

// Which patterns of bits are NaN or infinite.
enum class NonFinite : std::uint8_t {
  none,
  ieee,        // all exponent bits set: infinite, or NaN where the mantissa is not 0
  all_ones,    // NaN only: all bits set, but for the sign
  minus_zero,  // NaN only: the sign alone
};

// Of a number, or of both parts of a complex one: significant digits (the implicit one included),
// and the exponents of the largest and the smallest power of two.
struct FloatFormat {
  int digits = 0;
  int largest = 0;
  int smallest = 0;  // subnormal
  NonFinite non_finite = NonFinite::none;
};

// All that is known of a dtype, but for how it is cast (kernels/number.h).
struct DtypeInfo {
  std::string_view name;        // in safetensors headers and in every JSON of ours
  std::string_view torch_name;  // empty: torch has none
  DtypeKind kind = DtypeKind::boolean;
  std::uint8_t bits = 0;  // of one element
  bool is_signed = false;
  bool has_casts = false;  // to and from other dtypes
  FloatFormat format = {};
  Dtype dtype = Dtype::boolean;
};

// The only list of what dtypes are: who adds one is led here by the compiler.
// clang-format off
[[nodiscard]] constexpr DtypeInfo dtype_row(Dtype dtype) noexcept {
  constexpr auto truth = DtypeKind::boolean;
  constexpr auto integer = DtypeKind::integer;
  constexpr auto real = DtypeKind::floating;
  constexpr auto complex = DtypeKind::complex;
  constexpr auto ieee = NonFinite::ieee;
  constexpr auto ones = NonFinite::all_ones;
  constexpr auto minus = NonFinite::minus_zero;
  switch (dtype) {
    case Dtype::boolean: return {"BOOL", "bool", truth, 8, false, true};
    case Dtype::u8: return {"U8", "uint8", integer, 8, false, true};
    case Dtype::i8: return {"I8", "int8", integer, 8, true, true};
    case Dtype::u16: return {"U16", "uint16", integer, 16, false, true};
    case Dtype::i16: return {"I16", "int16", integer, 16, true, true};
    case Dtype::u32: return {"U32", "uint32", integer, 32, false, true};
    case Dtype::i32: return {"I32", "int32", integer, 32, true, true};
    case Dtype::u64: return {"U64", "uint64", integer, 64, false, true};
    case Dtype::i64: return {"I64", "int64", integer, 64, true, true};
    case Dtype::f16: return {"F16", "float16", real, 16, true, true, {11, 15, -24, ieee}};
    case Dtype::bf16: return {"BF16", "bfloat16", real, 16, true, true, {8, 127, -133, ieee}};
    case Dtype::f32: return {"F32", "float32", real, 32, true, true, {24, 127, -149, ieee}};
    case Dtype::f64: return {"F64", "float64", real, 64, true, true, {53, 1023, -1074, ieee}};
    case Dtype::c64: return {"C64", "complex64", complex, 64, true, false, {24, 127, -149, ieee}};
    case Dtype::f8_e4m3: return {"F8_E4M3", "float8_e4m3fn", real, 8, true, true, {4, 8, -9, ones}};
    case Dtype::f8_e5m2: return {"F8_E5M2", "float8_e5m2", real, 8, true, true, {3, 15, -16, ieee}};
    case Dtype::f8_e8m0:
      return {"F8_E8M0", "float8_e8m0fnu", real, 8, false, true, {1, 127, -127, ones}};
    case Dtype::f8_e4m3fnuz:
      return {"F8_E4M3FNUZ", "float8_e4m3fnuz", real, 8, true, false, {4, 7, -10, minus}};
    case Dtype::f8_e5m2fnuz:
      return {"F8_E5M2FNUZ", "float8_e5m2fnuz", real, 8, true, false, {3, 15, -17, minus}};
    case Dtype::f6_e2m3: return {"F6_E2M3", "", real, 6, true, false, {4, 2, -3}};
    case Dtype::f6_e3m2: return {"F6_E3M2", "", real, 6, true, false, {3, 4, -4}};
    case Dtype::f4: return {"F4", "", real, 4, true, false, {2, 2, -1}};
    case Dtype::c128:
      return {"C128", "complex128", complex, 128, true, false, {53, 1023, -1074, ieee}};
  }
  return {};  // not a dtype
}
// clang-format on

inline constexpr std::size_t dtype_count = [] {
  std::size_t count = 0;
  while (!dtype_row(static_cast<Dtype>(count)).name.empty()) ++count;
  return count;
}();
// In the order of Dtype.
inline constexpr auto dtype_table = [] {
  std::array<DtypeInfo, dtype_count> table = {};
  for (std::size_t i = 0; i < dtype_count; ++i) {
    table[i] = dtype_row(static_cast<Dtype>(i));
    table[i].dtype = static_cast<Dtype>(i);
  }
  return table;
}();

[[nodiscard]] constexpr const DtypeInfo& dtype_info(Dtype dtype) noexcept {
  return dtype_table[static_cast<std::size_t>(dtype)];
}
[[nodiscard]] constexpr std::string_view name(Dtype dtype) noexcept {
  return dtype_info(dtype).name;
}
[[nodiscard]] constexpr DtypeKind kind(Dtype dtype) noexcept { return dtype_info(dtype).kind; }
// Of one element.
[[nodiscard]] constexpr unsigned bits(Dtype dtype) noexcept { return dtype_info(dtype).bits; }
// Bytes of one element; 0 where elements are not whole bytes (f4, f6).
[[nodiscard]] constexpr std::size_t element_bytes(Dtype dtype) noexcept {
  return bits(dtype) % 8 == 0 ? bits(dtype) / 8 : 0;
}
// Of the widest element: buffers and loops that count elements are sized by it.
inline constexpr std::size_t element_bytes_max =
    std::ranges::max(dtype_table, {}, &DtypeInfo::bits).bits / 8;
// Whether a safetensors header can name the dtype.
[[nodiscard]] constexpr bool is_in_safetensors(Dtype dtype) noexcept {
  return dtype != Dtype::c128;
}
// None where no dtype has the name. The exact name only: "f32" is no dtype of the format, and files
// that say so are refused.
[[nodiscard]] LOADSTONE_API std::optional<Dtype> parse_dtype_name(std::string_view name) noexcept;
// What people type: any case, and torch's names ("bfloat16", "float8_e4m3fn", "half").
[[nodiscard]] LOADSTONE_API std::optional<Dtype> parse_dtype(std::string_view name) noexcept;

// Block formats of GGUF, in the order of their type ids.
enum class BlockFormat : std::uint8_t {
  q4_0,
  q4_1,
  q5_0,
  q5_1,
  q8_0,
  q8_1,
  q2_k,
  q3_k,
  q4_k,
  q5_k,
  q6_k,
  q8_k,
  iq2_xxs,
  iq2_xs,
  iq3_xxs,
  iq1_s,
  iq4_nl,
  iq3_s,
  iq2_s,
  iq4_xs,
  iq1_m,
  tq1_0,
  tq2_0,
  mxfp4,
  nvfp4,
  q1_0,
  q2_0,
};

// Bytes of `elements` numbers that stand together and can only be cut between blocks.
struct BlockLayout {
  std::uint32_t elements;
  std::uint32_t bytes;
};

// Value type, cheap to copy. Thread-safe: immutable.
class LOADSTONE_API Encoding {
 public:
  constexpr Encoding(Dtype dtype) noexcept  // NOLINT(google-explicit-constructor): a dtype is one
      : is_dtype_(true), code_(static_cast<std::uint8_t>(dtype)) {}
  constexpr Encoding(BlockFormat format) noexcept  // NOLINT(google-explicit-constructor)
      : is_dtype_(false), code_(static_cast<std::uint8_t>(format)) {}

  [[nodiscard]] constexpr bool is_dtype() const noexcept { return is_dtype_; }
  // Only where is_dtype().
  [[nodiscard]] constexpr Dtype dtype() const noexcept { return static_cast<Dtype>(code_); }
  // Only where !is_dtype().
  [[nodiscard]] constexpr BlockFormat block_format() const noexcept {
    return static_cast<BlockFormat>(code_);
  }
  // "BF16", "Q4_K" ...
  [[nodiscard]] std::string_view name() const noexcept;
  // Bytes that `elements` numbers take (rows of whole blocks); nothing when the count does not fill
  // whole blocks or whole bytes, or when the product does not fit 64 bits.
  [[nodiscard]] std::optional<std::uint64_t> byte_count(std::uint64_t elements) const noexcept;

  friend constexpr bool operator==(Encoding, Encoding) noexcept = default;

 private:
  bool is_dtype_;
  std::uint8_t code_;
};

// Returns nothing if no dtype or block format has the name, in any case.
[[nodiscard]] LOADSTONE_API std::optional<Encoding> parse_encoding(std::string_view name) noexcept;

// Of one block.
[[nodiscard]] LOADSTONE_API BlockLayout layout(BlockFormat format) noexcept;

}  // namespace loadstone
