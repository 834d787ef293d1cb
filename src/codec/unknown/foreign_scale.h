// Recognises codes in layouts that loadstone cannot decode, by the names of tensors next to them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "codec/tensor_table.h"

namespace loadstone {

// Recognises codes in formats without a codec (MLX, HQQ, TensorRT-LLM, ModelOpt's quantizers ...)
// by the name of a scale or zero point next to them. Returns nullopt for plain values.
[[nodiscard]] std::optional<QuantizedTensor> unknown_codes(const TensorTable& table,
                                                           std::uint32_t data);

// Recognises codes with unknown names by scales that no tensor uses. They cannot be decoded.
// `is_used` has one element per tensor: true for recognised codes and their components.
[[nodiscard]] std::vector<QuantizedTensor> codes_of_unused_scales(const TensorTable& table,
                                                                  const std::vector<bool>& is_used);

// Rejects a tensor whose companions change its meaning in a way that its codec does not know: zero
// points or an order of columns (unless the codec `reads_all`), a factor of activations, or a
// second scale.
void refuse_foreign_companions(const TensorTable& table, QuantizedTensor& quantized,
                               bool reads_all);

// Returns the float tensors of a module with unreadable codes, because each may be a component.
// Excludes the bias, which every library adds unchanged. Returns nothing for codes without a
// module.
[[nodiscard]] std::vector<std::uint32_t> floats_beside(const TensorTable& table,
                                                       const QuantizedTensor& codes);

// Mark a tensor as not decodable: because its layout has no decoder, or because it has no scales.
void refuse_layout(const TensorTable& table, QuantizedTensor& quantized);
void refuse_without_scales(const TensorTable& table, QuantizedTensor& quantized);

}  // namespace loadstone
