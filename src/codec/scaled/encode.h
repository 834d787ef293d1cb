// Steps of preparing an encoding with scales of blocks: what those that ModelOpt and
// compressed-tensors read have in common.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>

#include "kernels/quantize.h"
#include "loadstone/quantization.h"
#include "loadstone/shape.h"

namespace loadstone::scaled {

// Sets the dialect, and columns, rows and matrices.
[[nodiscard]] std::optional<DecodeProblem> begin_encoding(const Quantization& quantization,
                                                          const Shape& shape, QuantizeForm& form);
// The same, for those that take no vectors.
[[nodiscard]] std::optional<DecodeProblem> begin_matrices(const Quantization& quantization,
                                                          const Shape& shape, QuantizeForm& form);

// The shape with its last dimensions replaced: `taken` of them by `others`.
[[nodiscard]] Shape with_last(const Shape& shape, std::size_t taken,
                              std::initializer_list<std::uint64_t> others);

// Scales have the numbers' dtype where ModelOpt has them in it.
[[nodiscard]] Dtype scale_dtype(const QuantizeForm& form) noexcept;

// Rows whose blocks are all whole can be cut between them.
[[nodiscard]] std::uint64_t window_of_blocks(const QuantizeForm& form,
                                             std::uint64_t block) noexcept;

}  // namespace loadstone::scaled
