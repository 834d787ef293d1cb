// Whether a decoding fits the tensors that it is made of.
#pragma once

#include <optional>
#include <vector>

#include "kernels/decode.h"
#include "loadstone/catalog.h"
#include "loadstone/decoding.h"

namespace loadstone {

// Checks everything: that its sources are there and its kernel takes them.
[[nodiscard]] std::optional<DecodeProblem> check_decoding(const std::vector<TensorInfo>& tensors,
                                                          const Decoding& decoding,
                                                          DecodeForm& form);

}  // namespace loadstone
