// Encodes values window by window: the interface between the engine and encoders.
//
// A tensor is a stack of matrices (all dimensions except the last two), each encoded separately,
// such as the experts of a fused weight. Windows are runs of its elements. They may come in any
// order and from several threads; the bytes are the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kernels/bnb.h"
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
  nvfp4,
  mxfp4,
  mxfp8,
  gguf_blocks
};

// bitsandbytes' kernels have separate forms; blocks of GGUF are windows of gguf/, all others of
// modelopt/.
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
    case QuantizeKind::nvfp4:
    case QuantizeKind::mxfp4:
    case QuantizeKind::mxfp8:
    case QuantizeKind::gguf_blocks:
      break;
  }
  return false;
}

// Variants of the bytes in ModelOpt's family: one rounding; a compressed model's; its export's.
enum class QuantizeDialect : std::uint8_t { exact, compressed, exported };

// The kernel, geometry and parts of a quantized value. Value type.
struct QuantizedLayout {
  QuantizeKind kind = QuantizeKind::bnb4;
  QuantizeDialect dialect = QuantizeDialect::exact;
  Dtype dtype = Dtype::f32;  // of plain values
  std::uint64_t elements = 0;
  std::uint64_t window_elements = 1;  // windows are multiples of it, except the last
  std::uint64_t columns = 1;          // of a row
  std::uint64_t rows = 1;             // of a matrix
  std::uint64_t stack = 1;            // matrices
  std::uint64_t scratch_bytes = 0;    // kept from the first window to finish_quantized()
  // The largest magnitude of each matrix must be known before its first window: measure_window().
  bool needs_amax = false;
  std::vector<QuantizedPart> parts;
  bool nested = false;
  std::optional<float> nested_offset;
  Bnb4 bnb4;
  BlockFormat block = BlockFormat::q8_0;                 // of gguf_blocks
  std::shared_ptr<const std::vector<float>> importance;  // Quantization's
  // Values are cast to it first: those out of its range are infinite for the encoder.
  std::optional<Dtype> computed_in;

  [[nodiscard]] std::uint64_t matrix_elements() const noexcept { return rows * columns; }

  // Like window_elements, and if possible whole blocks of any source format, which are cheaper to
  // read.
  [[nodiscard]] std::uint64_t step_elements() const noexcept {
    const std::uint64_t window = window_elements == 0 ? 1 : window_elements;
    return (whole_elements + window - 1) / window * window;
  }
  // For a smaller value, all of it.
  [[nodiscard]] std::uint64_t step_bytes() const noexcept;
};

// Bytes of a part.
struct PartRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  [[nodiscard]] std::uint64_t size() const noexcept { return end - begin; }
};

// Updates `amax` with the largest magnitudes of any run [begin, end): one per matrix of the stack,
// 0 before the first window. Ignores non-finite values. Returns the index of the first one, or
// `end`. Tensors that share a scale use the largest amax among them.
std::uint64_t measure_window(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                             const std::byte* numbers, std::span<float> amax) noexcept;

// Returns the bytes of each component that the window [begin, end) writes; empty for components
// that finish_quantized() writes. As many `ranges` as components.
void part_ranges(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                 std::span<PartRange> ranges) noexcept;

// Returns true if finish_quantized() writes the whole component.
[[nodiscard]] bool is_finished_whole(const QuantizedLayout& form, std::size_t part);

// Encodes the elements [begin, end). `parts`: destinations of part_ranges(). `amax`: per matrix, if
// the form needs it. Returns the index of the first non-finite value, or `end`.
std::uint64_t quantize_window(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                              const std::byte* numbers, std::span<std::byte* const> parts,
                              std::span<const float> amax, std::byte* scratch) noexcept;

// Writes components that need all windows: nested statistics, scales of whole matrices. `parts` are
// whole components; those that windows write are not accessed and may be null.
void finish_quantized(const QuantizedLayout& form, std::span<std::byte* const> parts,
                      std::span<const float> amax, const std::byte* scratch) noexcept;

// Decodes the window [begin, end) as F32, F16 or BF16; not for bnb4 and bnb_int8. `parts`: the
// first byte of each of part_ranges(), and whole components of finish_quantized().
void dequantize_window(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                       std::span<const std::byte* const> parts, Dtype target,
                       std::byte* numbers) noexcept;

}  // namespace loadstone
