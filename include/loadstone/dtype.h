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

// The name in safetensors headers and in every JSON of ours: "F32", "BF16", "F8_E4M3", "BOOL" ...
[[nodiscard]] std::string_view name(Dtype dtype) noexcept;
// The exact name only: "f32" is no dtype of the format, and files that say so are refused.
[[nodiscard]] std::optional<Dtype> dtype_from_name(std::string_view name) noexcept;
// What people type: any case, and torch's names ("bfloat16", "float8_e4m3fn", "half").
[[nodiscard]] std::optional<Dtype> dtype_from_user(std::string_view name) noexcept;
// Bits of one element, in the order of Dtype. The only table of widths: buffers and loops that
// count elements are sized by it.
inline constexpr auto dtype_bits =
    std::to_array<std::uint8_t>({8,  8,  8,  16, 16, 32, 32, 64, 64, 16, 16,  //
                                 32, 64, 64, 8,  8,  8,  8,  8,  6,  6,  4,  128});
static_assert(dtype_bits.size() == static_cast<std::size_t>(Dtype::c128) + 1);
[[nodiscard]] constexpr unsigned bits(Dtype dtype) noexcept {
  return dtype_bits[static_cast<std::size_t>(dtype)];
}
// Bytes of one element; 0 where elements are not whole bytes (f4, f6).
[[nodiscard]] constexpr std::size_t element_bytes(Dtype dtype) noexcept {
  return bits(dtype) % 8 == 0 ? bits(dtype) / 8 : 0;
}
// Of the widest element.
inline constexpr std::size_t element_bytes_max = std::ranges::max(dtype_bits) / 8;
[[nodiscard]] DtypeKind kind(Dtype dtype) noexcept;

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
class Encoding {
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
  [[nodiscard]] static std::optional<Encoding> from_name(std::string_view name) noexcept;
  // Bytes that `elements` numbers take (rows of whole blocks); nothing when the count does not fill
  // whole blocks or whole bytes, or when the product does not fit 64 bits.
  [[nodiscard]] std::optional<std::uint64_t> byte_count(std::uint64_t elements) const noexcept;

  friend constexpr bool operator==(Encoding, Encoding) noexcept = default;

 private:
  bool is_dtype_;
  std::uint8_t code_;
};

[[nodiscard]] BlockLayout layout(BlockFormat format) noexcept;

}  // namespace loadstone
