// Codes in layouts that are not decoded, known by the names of tensors next to them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "codec/tensor_table.h"

namespace loadstone {

// Codes that no codec knows, next to whatever is named like a scale or a zero point: those of MLX,
// HQQ, TensorRT-LLM, ModelOpt's quantizers and others. Nothing: they are numbers.
[[nodiscard]] std::optional<QuantizedTensor> unknown_codes(const TensorTable& table,
                                                           std::uint32_t data);

// Codes next to scales that nothing uses, under names that no codec knows. The scales stay as they
// are stored, as the codes do. `is_used`: by tensor, of codes and their components.
[[nodiscard]] std::vector<QuantizedTensor> codes_of_unused_scales(const TensorTable& table,
                                                                  const std::vector<bool>& is_used);

// Whatever is beside the codes and changes their meaning in a way that their codec does not know:
// zero points, an order of columns (unless the codec `reads_all` of these), a factor for
// activations, a second scale. The tensor then cannot be read.
void refuse_foreign_companions(const TensorTable& table, QuantizedTensor& quantized,
                               bool reads_all);

// The other floats of a module whose codes no codec reads, except its bias, which every library
// adds as it is: any of them may go with the codes. Empty for codes outside of modules.
[[nodiscard]] std::vector<std::uint32_t> floats_beside(const TensorTable& table,
                                                       const QuantizedTensor& codes);

// The defects of a layout that is known and not decoded, and of codes whose scales are lost.
void refuse_layout(const TensorTable& table, QuantizedTensor& quantized);
void refuse_without_scales(const TensorTable& table, QuantizedTensor& quantized);

}  // namespace loadstone
