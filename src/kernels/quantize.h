// Numbers to the parts of an encoding, window by window: what an engine needs to know of encoders.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/bnb.h"
#include "kernels/decode.h"
#include "loadstone/quantization.h"

namespace loadstone {

// How a value is quantized. Value type.
struct QuantizeForm {
  Dtype dtype = Dtype::f32;  // of the numbers
  std::uint64_t elements = 0;
  std::uint64_t window_elements = 1;  // windows are multiples of it, but for the last one
  std::uint64_t columns = 1;          // of a row
  std::uint64_t scratch_bytes = 0;    // kept from the first window to finish_quantized()
  std::vector<QuantizedPart> parts;
  bool by_rows = false;  // int8
  bool nested = false;
  std::optional<float> nested_offset;
  Bnb4 bnb4;
};

// Fills in `form` and returns nothing, or says what does not fit.
[[nodiscard]] std::optional<DecodeProblem> prepare_quantization(const Quantization& quantization,
                                                                const Shape& shape, Dtype dtype,
                                                                QuantizeForm& form);

// Writes what the numbers [begin, end) become to their places in `parts`, which begin with the
// value's first bytes. Returns the place of the first number that is not finite, or `end`. Windows
// may come in any order and from several threads; the bytes are the same.
std::uint64_t quantize_window(const QuantizeForm& form, std::uint64_t begin, std::uint64_t end,
                              const std::byte* numbers, std::span<std::byte* const> parts,
                              std::byte* scratch) noexcept;

// What takes all windows: nested statistics.
void finish_quantized(const QuantizeForm& form, std::span<std::byte* const> parts,
                      const std::byte* scratch) noexcept;

}  // namespace loadstone
