// Integers of a few bits in words of 32, low bits first, with a scale and a zero point per group:
// the common part of GPTQ, AWQ and compressed-tensors. A value is the scale, as F32, times code
// minus zero point, which F32 represents exactly; it is rounded once.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "codec/decode.h"
#include "codec/tensor_table.h"

namespace loadstone::words {

// Storage of codes in words; for a matrix as stored, [rows, columns].
enum class Layout : std::uint8_t {
  down,         // a stream of bits down each column: GPTQ, [rows * bits / 32, columns]
  across,       // a stream along each row: compressed-tensors, [rows, ceil(columns * bits / 32)]
  interleaved,  // eight columns a word in the order 0 2 4 6 1 3 5 7: AWQ, [rows, columns / 8]
};

// Value type.
struct Packing {
  Layout layout = Layout::down;
  unsigned bits = 4;
  std::uint64_t rows = 0;
  std::uint64_t columns = 0;
  std::uint64_t group_size = 0;  // numbers of a group: down the rows; `across`, along the columns
  std::uint64_t groups = 1;
  Dtype scale = Dtype::f16;  // F32, F16 or BF16
  // `across` only: one scale for all, instead of [rows, groups].
  bool has_one_scale = false;
  // Stored zero points are less by it: 1 in the first version of GPTQ.
  unsigned zero_offset = 0;
  // Without zero points: what codes are offset by.
  bool has_zeros = false;
  // `across` only: the only zero point is a plain I8 without an offset.
  bool has_plain_zero = false;
  // The last component has the group of each row (of each column, if `across`), instead of an
  // order.
  bool has_order = false;
  Dtype dtype = Dtype::f32;  // of the decoded tensor
};

// Components: codes, scales, then zero points and the order of groups, if present. Sizes must have
// been checked; the groups of an order must exist.
void finish(const Packing& form, PreparedDecoder& made);

// Reads the field that begins at `bit` of a stream whose words are `stride` words apart, including
// the next word if the field straddles it.
[[nodiscard]] unsigned field_at(const std::byte* words, std::uint64_t stride, std::uint64_t bit,
                                unsigned bits) noexcept;

// ---- the tensors of a linear layer whose codes are packed in words: "P.qweight", "P.scales",
// "P.qzeros" and "P.g_idx" of GPTQ and AWQ

// Orders and zero points are read as headers are: a megabyte is an order of 262,144 inputs.
inline constexpr std::uint64_t order_bytes_max = 1u << 20;
inline constexpr std::uint64_t zeros_bytes_max = 16u << 20;

struct Module {
  std::string name;  // "P"
  std::uint32_t codes = TensorTable::none;
  std::uint32_t scales = TensorTable::none;
  std::uint32_t zeros = TensorTable::none;
  std::uint32_t order = TensorTable::none;
  std::vector<std::string> lacks;  // of scales and zero points

  // "P.weight", without a decoding.
  [[nodiscard]] QuantizedTensor quantized() const;
};

// Returns nullopt if the tensor is not a matrix of words with such a name.
[[nodiscard]] std::optional<Module> module_of(const TensorTable& table, std::uint32_t tensor);

// The parts of a request [rows, columns]: three, or four with an order; fills in rows, columns,
// groups, group size, dtypes and whether there is an order.
[[nodiscard]] std::optional<Problem> check_module(const DecodeRequest& request, Packing& form);

// Returns true if the number of groups determines their size. Sizes are powers of two; another
// quotient means that the last group is short, and the size is then unknown.
[[nodiscard]] constexpr bool are_even(std::uint64_t count, std::uint64_t groups) noexcept {
  return groups == 1 || (count % groups == 0 && std::has_single_bit(count / groups));
}

}  // namespace loadstone::words
