// The encodings of tensors: dtypes and block formats.
//
// A dtype is the type of a single element. A block format (Q4_K and others) packs a fixed number of
// elements and their scales into a fixed number of bytes. A tensor in a shard has an Encoding,
// which is a dtype or a block format. A target always has a dtype.
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
  c128,  // in torch files and models; safetensors and GGUF lack it
};

enum class DtypeKind : std::uint8_t { boolean, integer, floating, complex };

// The bit patterns of a dtype that are NaN or infinite.
enum class NonFinite : std::uint8_t {
  none,
  ieee,        // all exponent bits set: infinite if the mantissa is 0, otherwise NaN
  all_ones,    // NaN if all bits except the sign are set; nothing is infinite
  minus_zero,  // NaN if only the sign bit is set; nothing is infinite
};

// Precision of a real dtype, or of each part of a complex one: the number of significant digits
// (with the implicit one), and the exponents of the largest and smallest powers of two.
struct FloatFormat {
  int digits = 0;
  int largest = 0;
  int smallest = 0;  // the exponent of the smallest subnormal value
  NonFinite non_finite = NonFinite::none;
};

// All properties of a dtype, except its casts (kernels/number.h).
struct DtypeInfo {
  std::string_view name;        // as in safetensors headers and in JSON
  std::string_view torch_name;  // empty: torch has no such dtype
  DtypeKind kind = DtypeKind::boolean;
  std::uint8_t bits = 0;  // per element
  bool is_signed = false;
  bool has_casts = false;  // loadstone can cast from and to other dtypes
  FloatFormat format = {};
  Dtype dtype = Dtype::boolean;
};

// The only list of dtypes. Add a new dtype to the enum and here.
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
// The descriptions of all dtypes, indexed by Dtype.
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
// Returns the bits per element.
[[nodiscard]] constexpr unsigned bits(Dtype dtype) noexcept { return dtype_info(dtype).bits; }
// Returns the bytes per element; 0 if an element is not a whole number of bytes (f4, f6).
[[nodiscard]] constexpr std::size_t element_bytes(Dtype dtype) noexcept {
  return bits(dtype) % 8 == 0 ? bits(dtype) / 8 : 0;
}
// Size in bytes of the widest element.
inline constexpr std::size_t element_bytes_max =
    std::ranges::max(dtype_table, {}, &DtypeInfo::bits).bits / 8;
// Returns true if a safetensors header can name the dtype.
[[nodiscard]] constexpr bool is_in_safetensors(Dtype dtype) noexcept {
  return dtype != Dtype::c128;
}
// Parses the exact name of a dtype; nullopt if there is no such dtype. Names are case-sensitive,
// because "f32" is invalid in a safetensors header.
[[nodiscard]] LOADSTONE_API std::optional<Dtype> parse_dtype_name(std::string_view name) noexcept;
// Parses a name as people type it: in any case, or torch's ("bfloat16", "float8_e4m3fn", "half").
[[nodiscard]] LOADSTONE_API std::optional<Dtype> parse_dtype(std::string_view name) noexcept;

// GGUF's block formats, in the order of their type ids.
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

// The size of a block: `bytes` encode `elements` contiguous values. A tensor can be split only
// between blocks.
struct BlockLayout {
  std::uint32_t elements;
  std::uint32_t bytes;
};

// A dtype or a block format. Value type, cheap to copy. Immutable, so thread-safe.
class LOADSTONE_API Encoding {
 public:
  constexpr Encoding(Dtype dtype) noexcept  // NOLINT(google-explicit-constructor): a dtype is one
      : is_dtype_(true), code_(static_cast<std::uint8_t>(dtype)) {}
  constexpr Encoding(BlockFormat format) noexcept  // NOLINT(google-explicit-constructor)
      : is_dtype_(false), code_(static_cast<std::uint8_t>(format)) {}

  [[nodiscard]] constexpr bool is_dtype() const noexcept { return is_dtype_; }
  // Precondition: is_dtype().
  [[nodiscard]] constexpr Dtype dtype() const noexcept { return static_cast<Dtype>(code_); }
  // Precondition: !is_dtype().
  [[nodiscard]] constexpr BlockFormat block_format() const noexcept {
    return static_cast<BlockFormat>(code_);
  }
  // Returns "BF16", "Q4_K" ...
  [[nodiscard]] std::string_view name() const noexcept;
  // Returns the bytes of `elements` values; nullopt if they do not fill whole blocks or whole
  // bytes, or if the result does not fit into 64 bits.
  [[nodiscard]] std::optional<std::uint64_t> byte_count(std::uint64_t elements) const noexcept;

  friend constexpr bool operator==(Encoding, Encoding) noexcept = default;

 private:
  bool is_dtype_;
  std::uint8_t code_;
};

// Parses the name of a dtype or block format, in any case; nullopt if it is unknown.
[[nodiscard]] LOADSTONE_API std::optional<Encoding> parse_encoding(std::string_view name) noexcept;

// Returns the elements and bytes of one block.
[[nodiscard]] LOADSTONE_API BlockLayout layout(BlockFormat format) noexcept;

}  // namespace loadstone
