// Families of encodings, each in a separate folder: the only list of them. No other code depends on
// the name of an encoding, for reading or writing.
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

// Encodings that are recognised by the same names of tensors.
struct Family {
  // They decode the family; their names are those in plans.
  std::span<const DecodeKernel> kernels;
  // Returns the quantized tensor whose data (or, if that is missing, other component) this tensor
  // is: with a decoding or with a defect; nullopt if it does not belong to this family. Families
  // are tried in order, and the first that recognises a tensor gets it. Null: recognised by dtypes
  // alone.
  std::optional<QuantizedTensor> (*recognise)(const TensorTable& table,
                                              std::uint32_t tensor) = nullptr;
  // Supports or rejects zero points and orders of columns itself. For other families a tensor with
  // such companions is not decoded.
  bool reads_all = false;
  // Values of QuantizedTensor::encoding that can be decoded.
  std::span<const std::string_view> encodings{};
  // Suffixes of tables next to the data, needed by a kernel or not.
  std::span<const std::string_view> tables{};
  // Encodings that loadstone writes.
  std::span<const WrittenEncoding> written{};
  // The `quant_method` of configs that these layouts belong to; empty: several have them.
  std::string_view method{};
  // Its library stores weights of Conv1D layers as those of nn.Linear: see catalog/conv1d.h.
  bool stores_conv1d_transposed = false;
};

[[nodiscard]] std::span<const Family* const> families() noexcept;

// Methods whose layouts several families read.
[[nodiscard]] std::span<const std::string_view> shared_methods() noexcept;

// Returns true if a family belongs to the method. Returns false for other programs' names: their
// codes may belong to any family.
[[nodiscard]] bool is_own_method(std::string_view method) noexcept;

// The format of packed integers in the configs of compressed-tensors.
inline constexpr std::string_view packed_format = "pack-quantized";

// Returns true for a format of compressed-tensors that a family reads.
[[nodiscard]] bool is_compressed_format(std::string_view format) noexcept;

// Returns true if a config's `quant_method` means layouts that the families read. Other methods may
// pack their codes differently under the same names and shapes.
[[nodiscard]] bool has_known_layouts(std::string_view method) noexcept;

}  // namespace loadstone
