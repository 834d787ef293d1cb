// Recognises the companions of codes other than scales: markers that name an encoding, and scales
// and zero points of activations and of a server's cache. Only this module lists their names.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "codec/tensor_table.h"

namespace loadstone {

// Returns true if the last part of the name identifies a companion.
[[nodiscard]] bool is_companion_name(std::string_view name);
// Returns true for a companion of a single module, such as "P.input_scale" of "P.weight".
[[nodiscard]] bool is_module_companion(std::string_view name);

// The kind of values that a companion with this name scales: none if it is a marker.
enum class ScalesOf : std::uint8_t { none, activations, cache };
[[nodiscard]] ScalesOf scales_of(std::string_view name);

// Adds each companion to `unneeded` of its quantized tensor, and sets its element of `marks`. A
// companion that belongs to no single module goes to the nearest quantized tensor.
void attach_companions(const TensorTable& table, std::vector<QuantizedTensor>& found,
                       std::vector<bool>& marks);

}  // namespace loadstone
