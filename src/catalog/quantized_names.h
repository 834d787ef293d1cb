// Finds quantized tensors of files that are not written yet.
#pragma once

#include "loadstone/quantized_tensors.h"

namespace loadstone {

// Works like find_quantized_tensors(), but reads no data, so tensors that depend on states have no
// decoding.
[[nodiscard]] QuantizedTensors name_quantized_tensors(const Catalog& catalog);

}  // namespace loadstone
