// Compares stored tensors byte by byte.
#pragma once

#include "loadstone/catalog.h"

namespace loadstone {

// Compares the dtypes and elements of two matrices, of which one is stored transposed.
// Reads both, and keeps the second in memory.
[[nodiscard]] bool are_transposes(const Catalog& catalog, const TensorInfo& first,
                                  const TensorInfo& second);

// Compares the dtypes, shapes and bytes of two tensors. Reads both.
[[nodiscard]] bool are_equal(const Catalog& catalog, const TensorInfo& first,
                             const TensorInfo& second);

}  // namespace loadstone
