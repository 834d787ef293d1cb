// Numbers to the parts of an encoding, window by window: what an engine needs to know of encoders.
//
// A value is a stack of matrices, all of its dimensions but the last two, each encoded by itself:
// the experts of a fused weight. Windows are runs of its numbers. They may come in any order and
// from several threads; the bytes are the same.
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

// Kernels of bitsandbytes have forms of their own; blocks of GGUF are windows of gguf/, all others
// of modelopt/.
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

// Whose bytes ModelOpt's family has: one rounding, those in a compressed model, those of its
// export.
enum class QuantizeDialect : std::uint8_t { exact, compressed, exported };

// The kernel, geometry and parts of a quantized value. Value type.
struct QuantizedLayout {
  QuantizeKind kind = QuantizeKind::bnb4;
  QuantizeDialect dialect = QuantizeDialect::exact;
  Dtype dtype = Dtype::f32;  // of the numbers
  std::uint64_t elements = 0;
  std::uint64_t window_elements = 1;  // windows are multiples of it, but for the last one
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
  // Numbers are cast to it first: those beyond its range are infinite for the encoder.
  std::optional<Dtype> computed_in;

  [[nodiscard]] std::uint64_t matrix_elements() const noexcept { return rows * columns; }

  // As window_elements, and where it costs nothing whole blocks of whatever the numbers are made
  // of, which are cheaper to read.
  [[nodiscard]] std::uint64_t step_elements() const noexcept {
    const std::uint64_t window = window_elements == 0 ? 1 : window_elements;
    return (whole_elements + window - 1) / window * window;
  }
  // Of a value that has less, all of it.
  [[nodiscard]] std::uint64_t step_bytes() const noexcept;
};

// Bytes of a part.
struct PartRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  [[nodiscard]] std::uint64_t size() const noexcept { return end - begin; }
};

// Joins the largest magnitudes of the numbers [begin, end), any run, to `amax`: one for each matrix
// of the stack, 0 before the first window. Numbers that are not finite do not count. Returns the
// place of the first of those, or `end`. Values that share their scale share the largest of theirs.
std::uint64_t measure_window(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                             const std::byte* numbers, std::span<float> amax) noexcept;

// Which bytes of each part the window [begin, end) writes; none of those that finish_quantized()
// writes whole. As many `ranges` as parts.
void part_ranges(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                 std::span<PartRange> ranges) noexcept;

// Whether windows leave a part to finish_quantized(), which writes it whole.
[[nodiscard]] bool is_finished_whole(const QuantizedLayout& form, std::size_t part);

// Writes what the numbers [begin, end) become. `parts`: where the first byte of each of
// part_ranges() goes. `amax`: of each matrix, where the form needs it. Returns the place of the
// first number that is not finite, or `end`.
std::uint64_t quantize_window(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                              const std::byte* numbers, std::span<std::byte* const> parts,
                              std::span<const float> amax, std::byte* scratch) noexcept;

// What takes all windows: nested statistics, scales of whole matrices. `parts` are whole; those
// that windows have written are left alone and may be null.
void finish_quantized(const QuantizedLayout& form, std::span<std::byte* const> parts,
                      std::span<const float> amax, const std::byte* scratch) noexcept;

// The numbers [begin, end), a window, as F32, F16 or BF16: not of bnb4 and bnb_int8. `parts`: where
// the first byte of each of part_ranges() stands, and the whole of those that finish_quantized()
// wrote.
void dequantize_window(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                       std::span<const std::byte* const> parts, Dtype target,
                       std::byte* numbers) noexcept;

}  // namespace loadstone
