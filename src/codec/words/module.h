// The tensors of a linear layer whose codes stand in words: "P.qweight", "P.scales", "P.qzeros" and
// "P.g_idx" of GPTQ and AWQ.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "codec/tensor_table.h"
#include "codec/words/words.h"

namespace loadstone::words {

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

// Nothing: the tensor is no matrix of words that is called so.
[[nodiscard]] std::optional<Module> module_of(const TensorTable& table, std::uint32_t tensor);

// The parts of a request [rows, columns]: three, or four with an order; fills in rows, columns,
// groups, group size, dtypes and whether there is an order.
[[nodiscard]] std::optional<DecodeProblem> check_module(const DecodeRequest& request, Form& form);

// Whether the size of groups is told by their count alone. Sizes are powers of two; any other
// quotient means that the last group is short, and of which size nobody can tell.
[[nodiscard]] constexpr bool are_even(std::uint64_t count, std::uint64_t groups) noexcept {
  return groups == 1 || (count % groups == 0 && std::has_single_bit(count / groups));
}

}  // namespace loadstone::words
