// Decodes integers of a few bits that are packed in 32-bit words, low bits first, with a scale and
// a zero point per group: the common part of GPTQ, AWQ and compressed-tensors. The difference of
// code and zero point is exact in F32. It is multiplied by the scale in F32, and rounded once.
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

// Storage in words of the codes of a matrix [rows, columns].
enum class Layout : std::uint8_t {
  // GPTQ: a bit stream down each column, [rows * bits / 32, columns].
  down,
  // compressed-tensors: a bit stream along each row, [rows, ceil(columns * bits / 32)].
  across,
  // AWQ: eight columns per word in the order 0 2 4 6 1 3 5 7, [rows, columns / 8].
  interleaved,
};

// Value type.
struct Packing {
  Layout layout = Layout::down;
  unsigned bits = 4;
  std::uint64_t rows = 0;
  std::uint64_t columns = 0;
  std::uint64_t group_size = 0;  // rows per group, or columns per group if `across`
  std::uint64_t groups = 1;
  Dtype scale = Dtype::f16;  // F32, F16 or BF16
  // Only if `across`: one scale for the whole tensor instead of [rows, groups].
  bool has_one_scale = false;
  // Difference of zero points from their stored values: 1 in the first version of GPTQ, else 0.
  unsigned zero_offset = 0;
  // True if there are zero points. Otherwise codes are offset by half of their range.
  bool has_zeros = false;
  // Only if `across`: the only zero point is an I8 value without an offset.
  bool has_plain_zero = false;
  // True if the last component contains the group of each row (if `across`, of each column).
  // Otherwise groups are consecutive.
  bool has_order = false;
  Dtype dtype = Dtype::f32;  // dtype of the decoded tensor
};

// Creates the decoder. Its components are codes, scales, then zero points and the order of groups
// if present. The caller must have checked the sizes, and that the groups of an order exist.
void finish(const Packing& form, PreparedDecoder& made);

// Reads the field that begins at `bit` of a stream whose words are `stride` words apart, including
// the next word if the field straddles it.
[[nodiscard]] unsigned field_at(const std::byte* words, std::uint64_t stride, std::uint64_t bit,
                                unsigned bits) noexcept;

// ---- The tensors of a linear layer in GPTQ and AWQ: "P.qweight", "P.scales", "P.qzeros" and
// "P.g_idx"

// Limits for tensors that are read when a checkpoint is opened. An order of 262,144 inputs takes
// 1 MiB.
inline constexpr std::uint64_t order_bytes_max = 1u << 20;
inline constexpr std::uint64_t zeros_bytes_max = 16u << 20;

struct Module {
  std::string name;  // "P"
  std::uint32_t codes = TensorTable::none;
  std::uint32_t scales = TensorTable::none;
  std::uint32_t zeros = TensorTable::none;
  std::uint32_t order = TensorTable::none;
  std::vector<std::string> lacks;  // names of missing scales and zero points

  // Returns "P.weight" as a quantized tensor that has no Decoding.
  [[nodiscard]] QuantizedTensor quantized() const;
};

// Returns nullopt if the tensor is not a matrix of words with the name "P.qweight".
[[nodiscard]] std::optional<Module> module_of(const TensorTable& table, std::uint32_t tensor);

// Checks the components of a request for [rows, columns]: three, or four with an order. Sets rows,
// columns, groups, group size, dtypes and has_order of the packing.
[[nodiscard]] std::optional<Problem> check_module(const DecodeRequest& request, Packing& form);

// Returns true if the number of groups determines their size. Group sizes are powers of two, so any
// other quotient means that the last group is short and the size is unknown.
[[nodiscard]] constexpr bool are_even(std::uint64_t count, std::uint64_t groups) noexcept {
  return groups == 1 || (count % groups == 0 && std::has_single_bit(count / groups));
}

}  // namespace loadstone::words
