// Encodes and decodes tensors window by window: the interface between the engine and the kernels.
//
// A tensor is a stack of matrices, such as the experts of a fused weight. All dimensions except the
// last two form the stack. Each matrix is encoded separately. A window is a run of the tensor's
// elements. Windows may be encoded in any order and by several threads; the bytes are the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kernels/bnb.h"
#include "kernels/exact_matrix_scale.h"
#include "kernels/whole_elements.h"
#include "loadstone/quantization.h"

namespace loadstone {

enum class QuantizeKind : std::uint8_t {
  bnb4,
  bnb_int8,
  fp8,
  fp8_channel,
  fp8_block,
  int8_channel,
  int4,
  int4_awq,
  int4_packed,  // in words, as compressed-tensors stores it
  nvfp4,
  nvfp4_gguf,  // in the blocks of GGUF
  mxfp4,
  mxfp8,
  gguf_blocks
};

// Returns true for the kinds that bnb.h encodes. gguf/ encodes gguf_blocks, and modelopt/ all
// others.
[[nodiscard]] constexpr bool is_bitsandbytes(QuantizeKind kind) noexcept {
  switch (kind) {
    case QuantizeKind::bnb4:
    case QuantizeKind::bnb_int8:
      return true;
    case QuantizeKind::fp8:
    case QuantizeKind::fp8_channel:
    case QuantizeKind::fp8_block:
    case QuantizeKind::int8_channel:
    case QuantizeKind::int4:
    case QuantizeKind::int4_awq:
    case QuantizeKind::int4_packed:
    case QuantizeKind::nvfp4:
    case QuantizeKind::nvfp4_gguf:
    case QuantizeKind::mxfp4:
    case QuantizeKind::mxfp8:
    case QuantizeKind::gguf_blocks:
      break;
  }
  return false;
}

// Variants of ModelOpt's bytes: results that are rounded once, the bytes of a compressed model, and
// the bytes of an exported model.
enum class QuantizeDialect : std::uint8_t { exact, compressed, exported };

// The encoding, shape and components of a quantized tensor. Value type.
struct QuantizedLayout {
  QuantizeKind kind = QuantizeKind::bnb4;
  QuantizeDialect dialect = QuantizeDialect::exact;
  Dtype dtype = Dtype::f32;  // dtype of the values before encoding
  std::uint64_t elements = 0;
  std::uint64_t window_elements = 1;  // all windows except the last are multiples of this
  std::uint64_t columns = 1;          // columns of a row
  std::uint64_t rows = 1;             // rows of a matrix
  std::uint64_t stack = 1;            // number of matrices
  std::uint64_t group_size = 0;       // int4_packed: values per scale
  std::uint64_t scratch_bytes = 0;    // kept from the first window to finish_quantized()
  // True if measure_window() must find the largest magnitude of each matrix before its first
  // window.
  bool needs_amax = false;
  std::vector<QuantizedPart> parts;
  // True if blocks get an exact scale where there is one, see Quantization::exact_first. Values are
  // then F32 and aligned.
  bool exact_first = false;
  bool nested = false;
  std::optional<float> nested_offset;
  Bnb4 bnb4;
  BlockFormat block = BlockFormat::q8_0;                 // if the data are blocks of GGUF
  std::shared_ptr<const std::vector<float>> importance;  // see Quantization::importance
  // Dtype to which the encoder first casts values. Values beyond its range count as infinite.
  std::optional<Dtype> computed_in;

  [[nodiscard]] std::uint64_t matrix_elements() const noexcept { return rows * columns; }

  // Returns a multiple of window_elements, and if possible of the blocks of all source formats,
  // because whole blocks are cheaper to read.
  [[nodiscard]] std::uint64_t step_elements() const noexcept {
    const std::uint64_t window = window_elements == 0 ? 1 : window_elements;
    return (whole_elements + window - 1) / window * window;
  }
  // Returns the size of a step in bytes, or of the whole tensor if it is smaller.
  [[nodiscard]] std::uint64_t step_bytes() const noexcept;
};

// Range of bytes in a component.
struct PartRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  [[nodiscard]] std::uint64_t size() const noexcept { return end - begin; }
};

// Updates `amax` with the largest finite magnitudes of any run [begin, end). `amax` has one element
// per matrix of the stack, which must be 0 before the first window. Returns the index of the first
// non-finite value, or `end`. For tensors that share a scale, use the largest of their amax.
// `exact`: also one element per matrix; empty unless form.exact_first. For tensors that share a
// scale, join them.
std::uint64_t measure_window(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                             const std::byte* numbers, std::span<float> amax,
                             std::span<ExactScales> exact = {}) noexcept;

// Returns the scale with which the most blocks of a matrix are exact; 0 if `amax` determines it.
[[nodiscard]] float exact_matrix_scale(const QuantizedLayout& form, float amax,
                                       const ExactScales& exact) noexcept;

// Computes the bytes of each component that the window [begin, end) writes; an empty range for
// components that finish_quantized() writes. `ranges` must have one element per component.
void part_ranges(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                 std::span<PartRange> ranges) noexcept;

// Returns true if finish_quantized() writes the whole component.
[[nodiscard]] bool is_finished_whole(const QuantizedLayout& form, std::size_t part);

// Encodes the elements [begin, end). `parts`: for each component, the address to which its range of
// part_ranges() is written. `amax`: see measure_window(); empty unless needs_amax. `exact`: results
// of exact_matrix_scale() for each matrix, or empty. Returns the index of the first non-finite
// value, or `end`.
std::uint64_t quantize_window(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                              const std::byte* numbers, std::span<std::byte* const> parts,
                              std::span<const float> amax, std::byte* scratch,
                              std::span<const float> exact = {}) noexcept;

// Writes the components that depend on all windows: nested statistics and scales of whole matrices.
// `parts` are whole components. Components that windows write are not accessed and may be null.
void finish_quantized(const QuantizedLayout& form, std::span<std::byte* const> parts,
                      std::span<const float> amax, const std::byte* scratch,
                      std::span<const float> exact = {}) noexcept;

// Decodes the window [begin, end) to F32, F16 or BF16. Does not support bnb4 and bnb_int8. `parts`:
// for each component, the first byte of its range of part_ranges(), or the whole component if
// finish_quantized() writes it.
void dequantize_window(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                       std::span<const std::byte* const> parts, Dtype target,
                       std::byte* numbers) noexcept;

}  // namespace loadstone
