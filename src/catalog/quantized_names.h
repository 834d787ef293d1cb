// Quantized tensors of files that are not written yet.
#pragma once

#include "loadstone/quantized_tensors.h"

namespace loadstone {

// As find_quantized_tensors(), but nothing is read: what depends on states has no decoding.
[[nodiscard]] QuantizedTensors name_quantized_tensors(const Catalog& catalog);

}  // namespace loadstone
