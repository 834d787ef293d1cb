#include "kernels/quantize.h"

#include <algorithm>
#include <cstring>

#include "base/ceil_div.h"
#include "kernels/gguf/block_scales.h"
#include "kernels/gguf/window.h"
#include "kernels/modelopt.h"
#include "kernels/modelopt/scales.h"

namespace loadstone {

std::uint64_t QuantizedLayout::step_bytes() const noexcept {
  return std::min(step_elements(), elements) * element_bytes(dtype);
}

void part_ranges(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                 std::span<PartRange> ranges) noexcept {
  std::ranges::fill(ranges, PartRange{});
  if (begin == end) return;
  if (form.kind == QuantizeKind::gguf_blocks) {
    const BlockLayout block = layout(form.block);
    ranges[0] = {begin / block.elements * block.bytes, end / block.elements * block.bytes};
    return;
  }
  if (!is_bitsandbytes(form.kind)) return scaled_part_ranges(form, begin, end, ranges);
  constexpr std::uint64_t scale = sizeof(float);
  if (form.kind == QuantizeKind::bnb_int8) {
    ranges[0] = {begin, end};
    ranges[1] = {begin / form.columns * scale, end / form.columns * scale};
    return;
  }
  ranges[0] = {begin / 2, ceil_div(end, 2)};
  if (form.nested) return;
  const std::uint64_t block = form.bnb4.block_size;
  ranges[1] = {begin / block * scale, ceil_div(end, block) * scale};
}

// Returns the index of the first value of the first block with a non-finite scale, or `end`. A
// scale overflows F16 if values are near the largest F32.
static std::uint64_t first_odd_block(const QuantizedLayout& form, std::uint64_t begin,
                                     std::uint64_t end, const std::byte* blocks) noexcept {
  const BlockLayout block = layout(form.block);
  for (std::uint64_t at = begin; at < end; at += block.elements, blocks += block.bytes) {
    if (has_nonfinite_scale(form.block, blocks)) return at;
  }
  return end;
}

bool is_finished_whole(const QuantizedLayout& form, std::size_t part) {
  std::vector<PartRange> ranges(form.parts.size());
  part_ranges(form, 0, form.elements, ranges);
  return ranges[part].size() == 0;
}

std::uint64_t quantize_window(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                              const std::byte* numbers, std::span<std::byte* const> parts,
                              std::span<const float> amax, std::byte* scratch,
                              std::span<const float> exact) noexcept {
  if (begin == end) return end;
  if (form.kind == QuantizeKind::gguf_blocks) {
    const std::uint64_t bad = encode_gguf_window(form, begin, end, numbers, parts[0]);
    return std::min(bad, first_odd_block(form, begin, end, parts[0]));
  }
  if (!is_bitsandbytes(form.kind))
    return encode_scaled_window(form, begin, end, numbers, parts, {amax, exact});
  if (form.kind == QuantizeKind::bnb_int8) {
    return begin + encode_bnb_int8(form.bnb4.dialect, form.dtype, numbers,
                                   (end - begin) / form.columns, form.columns, parts[0], parts[1]);
  }
  std::byte* const absmax =
      form.nested ? scratch + begin / form.bnb4.block_size * sizeof(float) : parts[1];
  return begin + encode_bnb4(form.bnb4, form.dtype, numbers, end - begin, parts[0], absmax);
}

void finish_quantized(const QuantizedLayout& form, std::span<std::byte* const> parts,
                      std::span<const float> amax, const std::byte* scratch,
                      std::span<const float> exact) noexcept {
  if (!is_bitsandbytes(form.kind)) return finish_scaled(form, parts, {amax, exact});
  if (!form.nested) return;
  const std::uint64_t blocks = form.scratch_bytes / sizeof(float);
  const float offset =
      form.nested_offset ? *form.nested_offset : bnb_nested_offset(scratch, blocks);
  encode_bnb_nested(form.bnb4.dialect, scratch, blocks, offset, scaled::most_finite(form.dtype),
                    parts[1], parts[2]);
  std::memcpy(parts[3], &offset, sizeof(offset));
}

void dequantize_window(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                       std::span<const std::byte* const> parts, Dtype target,
                       std::byte* numbers) noexcept {
  if (begin == end) return;
  if (form.kind == QuantizeKind::gguf_blocks) {
    return decode_gguf_window(form, begin, end, parts[0], target, numbers);
  }
  if (!is_bitsandbytes(form.kind)) decode_scaled_window(form, begin, end, parts, target, numbers);
}

}  // namespace loadstone
