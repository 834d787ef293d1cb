#include "kernels/quantize.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/ceil_div.h"
#include "kernels/modelopt.h"
#include "kernels/modelopt/scales.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

std::optional<DecodeProblem> prepare_rows(const Shape& shape, QuantizeForm& form) {
  if (shape.rank() != 2) {
    return DecodeProblem{"int8 takes matrices", shape.text(), "[rows, columns]"};
  }
  form.kind = QuantizeKind::bnb_int8;
  form.rows = shape[0];
  form.columns = shape[1];
  form.window_elements = std::max<std::uint64_t>(shape[1], 1);
  form.parts = {{"data", shape, Dtype::i8}, {"absmax", {shape[0]}, Dtype::f32}};
  return std::nullopt;
}

std::optional<DecodeProblem> prepare_blocks(const Quantization& quantization, QuantizeForm& form) {
  if (!is_bnb_block_size(quantization.block_size)) {
    return DecodeProblem{"no such block size", fmt::format("{}", quantization.block_size),
                         "32, 64, 128 ... 4096"};
  }
  form.bnb4.code = quantization.encoding == "nf4" ? Bnb4Code::nf4 : Bnb4Code::fp4;
  form.bnb4.block_size = quantization.block_size;
  form.window_elements = quantization.block_size;
  form.nested = quantization.nested;
  form.nested_offset = quantization.nested_offset;
  const std::uint64_t blocks = ceil_div(form.elements, quantization.block_size);
  form.parts.push_back({"data", {ceil_div(form.elements, 2), 1}, Dtype::u8});
  if (!form.nested) {
    form.parts.push_back({"absmax", {blocks}, Dtype::f32});
    return std::nullopt;
  }
  form.parts.push_back({"absmax", {blocks}, Dtype::u8});
  form.parts.push_back({"nested_absmax", {ceil_div(blocks, bnb_nested_block_size)}, Dtype::f32});
  form.parts.push_back({"nested_offset", Shape(), Dtype::f32});
  form.scratch_bytes = blocks * sizeof(float);
  return std::nullopt;
}

bool is_scaled(const QuantizeForm& form) {
  return form.kind != QuantizeKind::bnb4 && form.kind != QuantizeKind::bnb_int8;
}

}  // namespace

std::uint64_t QuantizeForm::step_bytes() const noexcept {
  return std::min(step_elements(), elements) * element_bytes(dtype);
}

std::optional<DecodeProblem> prepare_quantization(const Quantization& quantization,
                                                  const Shape& shape, Dtype dtype,
                                                  QuantizeForm& form) {
  form = {};
  if (dtype != Dtype::f32 && dtype != Dtype::f16 && dtype != Dtype::bf16) {
    return DecodeProblem{"only F32, F16 and BF16 are quantized", std::string(name(dtype)), {}};
  }
  const auto elements = shape.numel();
  if (!elements || !Encoding(dtype).byte_count(*elements)) {
    return DecodeProblem{"the size does not fit 64 bits", shape.text(), {}};
  }
  form.dtype = dtype;
  form.elements = *elements;
  if (quantization.nested_offset && !quantization.nested) {
    return DecodeProblem{"an offset of nested scales, and the scales are not nested", {}, {}};
  }
  if (const auto kind = scaled_kind(quantization.encoding)) {
    form.kind = *kind;
    return prepare_scaled(quantization, shape, form);
  }
  if (quantization.dialect == "bnb-cuda") {
    form.bnb4.dialect = BnbDialect::cuda;
  } else if (!quantization.dialect.empty() && quantization.dialect != "bnb-cpu") {
    return DecodeProblem{"no such dialect", quantization.dialect, "bnb-cpu or bnb-cuda"};
  }
  if (quantization.encoding == "int8") {
    if (quantization.nested) return DecodeProblem{"int8 has no nested scales", {}, {}};
    return prepare_rows(shape, form);
  }
  if (quantization.encoding != "nf4" && quantization.encoding != "fp4") {
    return DecodeProblem{"no such encoding", quantization.encoding,
                         "nf4, fp4, int8, " + scaled_names()};
  }
  return prepare_blocks(quantization, form);
}

void part_ranges(const QuantizeForm& form, std::uint64_t begin, std::uint64_t end,
                 std::span<PartRange> ranges) noexcept {
  std::ranges::fill(ranges, PartRange{});
  if (begin == end) return;
  if (is_scaled(form)) return scaled_part_ranges(form, begin, end, ranges);
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

std::uint64_t quantize_window(const QuantizeForm& form, std::uint64_t begin, std::uint64_t end,
                              const std::byte* numbers, std::span<std::byte* const> parts,
                              std::span<const float> amax, std::byte* scratch) noexcept {
  if (begin == end) return end;
  if (is_scaled(form)) return encode_scaled_window(form, begin, end, numbers, parts, amax);
  if (form.kind == QuantizeKind::bnb_int8) {
    return begin + encode_bnb_int8(form.bnb4.dialect, form.dtype, numbers,
                                   (end - begin) / form.columns, form.columns, parts[0], parts[1]);
  }
  std::byte* const absmax =
      form.nested ? scratch + begin / form.bnb4.block_size * sizeof(float) : parts[1];
  return begin + encode_bnb4(form.bnb4, form.dtype, numbers, end - begin, parts[0], absmax);
}

void finish_quantized(const QuantizeForm& form, std::span<std::byte* const> parts,
                      std::span<const float> amax, const std::byte* scratch) noexcept {
  if (is_scaled(form)) return finish_scaled(form, parts, amax);
  if (!form.nested) return;
  const std::uint64_t blocks = form.scratch_bytes / sizeof(float);
  const float offset =
      form.nested_offset ? *form.nested_offset : bnb_nested_offset(scratch, blocks);
  encode_bnb_nested(form.bnb4.dialect, scratch, blocks, offset, scaled::most_finite(form.dtype),
                    parts[1], parts[2]);
  std::memcpy(parts[3], &offset, sizeof(offset));
}

void dequantize_window(const QuantizeForm& form, std::uint64_t begin, std::uint64_t end,
                       std::span<const std::byte* const> parts, Dtype target,
                       std::byte* numbers) noexcept {
  if (begin < end && is_scaled(form))
    decode_scaled_window(form, begin, end, parts, target, numbers);
}

std::vector<QuantizedPart> quantized_parts(const Quantization& quantization, const Shape& shape,
                                           Dtype dtype) {
  QuantizeForm form;
  if (auto problem = prepare_quantization(quantization, shape, dtype, form)) {
    throw Error("plan.quantize", std::move(problem->message),
                {.field = "quantize",
                 .found = std::move(problem->found),
                 .expected = std::move(problem->expected)});
  }
  return std::move(form.parts);
}

}  // namespace loadstone
