// Codes in layouts that are not decoded, known by the names of tensors next to them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "codec/tensor_table.h"

namespace loadstone {

// Recognises codes in formats without a codec (MLX, HQQ, TensorRT-LLM, ModelOpt's quantizers ...),
// by the name of a scale or zero point next to them. nullopt: plain values.
[[nodiscard]] std::optional<QuantizedTensor> unknown_codes(const TensorTable& table,
                                                           std::uint32_t data);

// Recognises codes with unknown names by scales that nothing uses. Codes and scales are not
// decoded. `is_used`: by tensor, for known codes and their components.
[[nodiscard]] std::vector<QuantizedTensor> codes_of_unused_scales(const TensorTable& table,
                                                                  const std::vector<bool>& is_used);

// Rejects a tensor with companions that change its meaning in a way unknown to its codec: zero
// points, an order of columns (unless the codec `reads_all`), a factor for activations, a second
// scale.
void refuse_foreign_companions(const TensorTable& table, QuantizedTensor& quantized,
                               bool reads_all);

// Returns the other floats of a module with unreadable codes, except its bias, which every library
// adds unchanged: any of them may be a component. Empty for codes outside of modules.
[[nodiscard]] std::vector<std::uint32_t> floats_beside(const TensorTable& table,
                                                       const QuantizedTensor& codes);

// The defects of a layout that is known and not decoded, and of codes whose scales are lost.
void refuse_layout(const TensorTable& table, QuantizedTensor& quantized);
void refuse_without_scales(const TensorTable& table, QuantizedTensor& quantized);

}  // namespace loadstone
