// Compares the configs next to a checkpoint with its quantized tensors.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "catalog/open_file.h"
#include "codec/tensor_table.h"
#include "loadstone/finding.h"
#include "loadstone/quantized_tensor.h"

namespace loadstone {

// Returns a warning "q.config" that a file contradicts the tensors.
[[nodiscard]] Finding contradiction(std::string_view path, std::string found, std::string expected);

// Returns the encodings of the readable tensors and the name of one such tensor, or an empty
// string.
[[nodiscard]] std::string described(std::span<const QuantizedTensor> tensors);

// Returns a warning for each field of a config that no tensor confirms: the method; ModelOpt's
// algorithm and groups; compressed-tensors' format, bits, type of codes, strategy, symmetry and
// sparsity; lists of modules that exclude quantized ones. Skips methods and fields that loadstone
// does not know. Decoding depends only on the tensors, never on these fields.
[[nodiscard]] std::vector<Finding> contradictions(const TensorTable& table,
                                                  std::span<const QuantizedTensor> tensors,
                                                  const FileOpener& opener,
                                                  const std::string& folder);

}  // namespace loadstone
