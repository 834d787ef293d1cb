#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/ceil_div.h"
#include "codec/bnb/state.h"
#include "codec/bnb/weights.h"
#include "kernels/bnb_parts.h"

namespace loadstone {

namespace {

constexpr std::array dialects = {name(BnbDialect::cpu), name(BnbDialect::cuda)};

void set_dialect(const Quantization& quantization, QuantizedLayout& form) {
  form.bnb4.dialect = from_name<BnbDialect>(quantization.dialect).value_or(BnbDialect::cpu);
}

std::optional<Problem> write_rows(const Quantization& quantization, const Shape& shape,
                                  QuantizedLayout& form) {
  set_dialect(quantization, form);
  if (quantization.nested) return Problem{"int8 does not support nested scales"};
  if (shape.rank() != 2) {
    return Problem{"int8 quantizes only matrices", shape.text(), "[rows, columns]"};
  }
  form.computed_in = Dtype::f16;
  form.rows = shape[0];
  form.columns = shape[1];
  form.window_elements = std::max<std::uint64_t>(shape[1], 1);
  form.parts = {{"data", shape, Dtype::i8}, {"absmax", {shape[0]}, Dtype::f32}};
  return std::nullopt;
}

template <Bnb4Code code>
std::optional<Problem> write_blocks(const Quantization& quantization, const Shape& /*shape*/,
                                    QuantizedLayout& form) {
  set_dialect(quantization, form);
  if (!is_bnb_block_size(quantization.block_size)) {
    return Problem{"this block size is not supported", fmt::format("{}", quantization.block_size),
                   "32, 64, 128 ... 4096"};
  }
  form.bnb4.code = code;
  form.bnb4.block_size = quantization.block_size;
  form.window_elements = quantization.block_size;
  form.nested = quantization.nested;
  form.nested_offset = quantization.nested_offset;
  const std::uint64_t blocks = ceil_div(form.elements, quantization.block_size);
  form.parts = {{"data", {ceil_div(form.elements, 2), 1}, Dtype::u8},
                {"absmax", {blocks}, form.nested ? Dtype::u8 : Dtype::f32}};
  if (!form.nested) return std::nullopt;
  form.parts.push_back({"nested_absmax", {ceil_div(blocks, bnb_nested_block_size)}, Dtype::f32});
  form.parts.push_back({"nested_offset", Shape(), Dtype::f32});
  form.scratch_bytes = blocks * sizeof(float);
  return std::nullopt;
}

using Bytes = std::shared_ptr<const std::vector<std::byte>>;

Bytes bytes_of(std::span<const std::byte> bytes) {
  return std::make_shared<const std::vector<std::byte>>(bytes.begin(), bytes.end());
}

// Returns the table of the codes' values and the state as JSON. All weights share the table's
// bytes.
template <Bnb4Code code>
std::vector<ConstantComponent> state(const Quantization& quantization, const Shape& shape,
                                     Dtype dtype) {
  static const Bytes map = bytes_of(std::as_bytes(bnb4_values(code)));
  const std::string text = bnb_state_text(
      quantization.encoding,
      {.shape = shape, .dtype = dtype, .block_size = quantization.block_size, .nested_offset = {}});
  return {{"weight.quant_map", {bnb4_values(code).size()}, Dtype::f32, map},
          {"weight.quant_state.bitsandbytes__" + quantization.encoding,
           {text.size()},
           Dtype::u8,
           bytes_of(std::as_bytes(std::span(text)))}};
}

// Returns the tensor that declares the order of the data's bytes: 0 means row-major.
std::vector<ConstantComponent> weight_format(const Quantization& /*quantization*/,
                                             const Shape& /*shape*/, Dtype /*dtype*/) {
  static const Bytes rows = bytes_of(std::array{std::byte{0}});
  return {{"weight_format", Shape(), Dtype::u8, rows}};
}

constexpr std::array four_bit_names = {ComponentName{"data", "weight"},
                                       ComponentName{"absmax", "weight.absmax"}};
constexpr std::array int8_names = {ComponentName{"data", "weight"}, ComponentName{"absmax", "SCB"}};

constexpr std::array written = {
    WrittenEncoding{
        .name = name(BnbEncoding::nf4),
        .kind = QuantizeKind::bnb4,
        .bits = 4,
        .code_type = "float",
        .kernel = "bnb_nf4",
        .prepare = write_blocks<Bnb4Code::nf4>,
        .bnb_names = four_bit_names,
        .constants = state<Bnb4Code::nf4>,
        .typical_error = 0.0920F,
        .dialects = dialects,
        .cuda_dialect = dialects[1],
        .takes_block_size = true,
    },
    WrittenEncoding{
        .name = name(BnbEncoding::fp4),
        .kind = QuantizeKind::bnb4,
        .bits = 4,
        .code_type = "float",
        .kernel = "bnb_fp4",
        .prepare = write_blocks<Bnb4Code::fp4>,
        .bnb_names = four_bit_names,
        .constants = state<Bnb4Code::fp4>,
        .typical_error = 0.1219F,
        .dialects = dialects,
        .cuda_dialect = dialects[1],
        .takes_block_size = true,
    },
    WrittenEncoding{
        .name = name(BnbEncoding::int8),
        .kind = QuantizeKind::bnb_int8,
        .bits = 8,
        .code_type = "int",
        .kernel = "bnb_int8",
        .prepare = write_rows,
        .bnb_names = int8_names,
        .constants = weight_format,
        .typical_error = 0.0079F,
        .dialects = dialects,
        .cuda_dialect = dialects[1],
    },
};

}  // namespace

std::span<const WrittenEncoding> bnb_written() noexcept { return written; }

}  // namespace loadstone
