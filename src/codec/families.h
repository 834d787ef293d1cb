// Declares the families of encodings and their list. Each family has its own folder. No other code
// depends on the name of an encoding, neither to read nor to write it.
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

// Encodings that are recognised by the same tensor names.
struct Family {
  // Kernels that decode the family. Plans contain their names.
  std::span<const DecodeKernel> kernels;
  // If this tensor is the data of a quantized tensor of the family, or another component whose data
  // is missing, returns the quantized tensor with a decoding or a defect. Otherwise returns
  // nullopt. The first family that recognises a tensor gets it. Null if dtypes alone identify the
  // family.
  std::optional<QuantizedTensor> (*recognise)(const TensorTable& table,
                                              std::uint32_t tensor) = nullptr;
  // True if the family handles zero points and column orders itself. For other families, a tensor
  // with such companions is rejected.
  bool reads_all = false;
  // Values of QuantizedTensor::encoding that the family's kernels decode. A family without kernels
  // decodes by those of others, whose encodings it does not list again.
  std::span<const std::string_view> encodings{};
  // Suffixes of tables that are stored with the data, even if no kernel needs them.
  std::span<const std::string_view> tables{};
  // Encodings of the family that loadstone writes.
  std::span<const WrittenEncoding> written{};
  // The config's `quant_method` for these layouts. Empty if several methods use them.
  std::string_view method{};
  // True if the library stores weights of Conv1D layers like those of nn.Linear, see
  // catalog/conv1d.h.
  bool stores_conv1d_transposed = false;
};

[[nodiscard]] std::span<const Family* const> families() noexcept;

// Returns true if a family lists the encoding.
[[nodiscard]] bool is_listed(std::string_view encoding) noexcept;

// Returns the methods whose layouts several families read.
[[nodiscard]] std::span<const std::string_view> shared_methods() noexcept;

// Returns true if the method is that of a family or a shared method. Returns false for names of
// other programs, whose codes may belong to any family.
[[nodiscard]] bool is_own_method(std::string_view method) noexcept;

// Returns true for a format of compressed-tensors that a family reads.
[[nodiscard]] bool is_compressed_format(std::string_view format) noexcept;

// Returns true if the families read the layouts of a config's `quant_method`. An unknown method may
// pack its codes differently under the same names and shapes.
[[nodiscard]] bool has_known_layouts(std::string_view method) noexcept;

}  // namespace loadstone
