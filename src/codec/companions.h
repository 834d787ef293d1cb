// The one table of what goes with codes besides their scales: markers that programs know an
// encoding by, scales and zero points of activations and of a server's cache.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "codec/tensor_table.h"

namespace loadstone {

// ComfyUI's text in the header's metadata: {"layers": {module: marker}}. Its programs prefer it to
// the tensors "module.comfy_quant", which contain the same markers.
inline constexpr std::string_view layers_metadata_key = "_quantization_metadata";

// Returns whether the last part of the name is in the table.
[[nodiscard]] bool is_companion_name(std::string_view name);
// Returns whether it is one of a single module, such as "P.input_scale" of "P.weight".
[[nodiscard]] bool is_module_companion(std::string_view name);

// The kind of values that a companion with this name scales. Markers scale none.
enum class ScalesOf : std::uint8_t { none, activations, cache };
[[nodiscard]] ScalesOf scales_of(std::string_view name);

// Adds each companion to `unneeded` of its quantized tensor, and marks it. A companion above
// modules belongs to the nearest of them.
void attach_companions(const TensorTable& table, std::vector<QuantizedTensor>& found,
                       std::vector<bool>& marks);

// Rejects tensors whose marker names another encoding than their names and shapes suggest: rotated
// columns and scales in another order look the same. Reads markers that are tensors.
void check_markers(const TensorTable& table, std::vector<QuantizedTensor>& found);

}  // namespace loadstone
