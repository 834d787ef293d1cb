// Families of encodings, each described in a folder of its own: the only list of them. Nothing else
// switches on the name of an encoding, whether it is read or written.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "codec/decode.h"
#include "codec/encode.h"
#include "codec/tensor_table.h"
#include "loadstone/quantized_tensor.h"

namespace loadstone {

// Encodings that are told by the same names of tensors.
struct Family {
  // They decode the family; their names are those in plans.
  std::span<const DecodeKernel> kernels;
  // The quantized tensor that this tensor is the data of (or, where that is missing, another
  // component): with a decoding, or with a defect. Nothing: it is none of the family's. Families
  // are asked in their order, and the first that knows a tensor has it. Null: their tensors are
  // told by their dtypes alone.
  std::optional<QuantizedTensor> (*recognise)(const TensorTable& table,
                                              std::uint32_t tensor) = nullptr;
  // It knows what zero points and orders of columns mean, or refuses them itself. Others do not,
  // and a tensor that has such companions is not decoded.
  bool reads_all = false;
  // Values of QuantizedTensor::encoding that can be decoded.
  std::span<const std::string_view> encodings{};
  // Tables that stand beside the data, whether a kernel needs them or not: behind its name.
  std::span<const std::string_view> tables{};
  // Those that numbers are quantized to.
  std::span<const WrittenEncoding> written{};
  // The `quant_method` of configs that these layouts belong to; empty: several have them.
  std::string_view method{};
  // Its library stores weights of Conv1D layers as those of nn.Linear: see catalog/conv1d.h.
  bool stores_conv1d_transposed = false;
};

[[nodiscard]] std::span<const Family* const> families() noexcept;

// Methods whose layouts several families read.
[[nodiscard]] std::span<const std::string_view> shared_methods() noexcept;

// Returns true if a family or several are those of the method. A name that other programs have for
// it is not: their codes may be of any family.
[[nodiscard]] bool is_own_method(std::string_view method) noexcept;

// The format of packed integers in the configs of compressed-tensors.
inline constexpr std::string_view packed_format = "pack-quantized";

// Returns true for a format of compressed-tensors that a family reads.
[[nodiscard]] bool is_compressed_format(std::string_view format) noexcept;

// Returns whether a config's `quant_method` means layouts that the families read. Other methods
// may pack their codes in other ways under the same names and shapes.
[[nodiscard]] bool has_known_layouts(std::string_view method) noexcept;

}  // namespace loadstone
