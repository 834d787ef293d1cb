// Encodes blocks of ModelOpt's encodings exactly, if they have an exact scale. All values are F32
// and aligned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "kernels/exact_matrix_scale.h"
#include "kernels/exact_scale.h"
#include "kernels/quantize.h"

namespace loadstone::scaled {

// Returns the exact scale of values that become one byte each.
[[nodiscard]] std::optional<float> exact_scale_of(const QuantizedLayout& form,
                                                  const BlockValues& values) noexcept;

// Each function replaces the blocks that have an exact scale: of a row, of `count` values, or of
// two rows.
void encode_nvfp4_exactly(float scale_2, const float* numbers, std::uint64_t columns,
                          std::byte* data, std::byte* scales) noexcept;
void encode_int4_exactly(const float* numbers, std::uint64_t count, std::byte* data,
                         std::byte* scales) noexcept;
void encode_int4_groups_exactly(std::uint64_t group_size, const float* numbers, std::uint64_t count,
                                std::byte* data, std::byte* scales) noexcept;
void encode_int4_rows_exactly(const float* numbers, std::uint64_t columns, std::byte* data,
                              std::byte* scales) noexcept;

}  // namespace loadstone::scaled
