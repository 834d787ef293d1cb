// Recognises DeepSeek-V4's names: "P.weight" with "P.scale". See docs/formats/deepseek-v4.md
#include <array>
#include <utility>

#include "base/ceil_div.h"
#include "codec/families.h"
#include "codec/scaled/scaled.h"
#include "kernels/modelopt/scales.h"

namespace loadstone {

namespace {

// Two E2M1 codes per byte, with a scale for each 32 values of a row.
void decode_experts(const TensorTable& table, QuantizedTensor& made) {
  const TensorInfo& scale = table[made.scales.front()];
  auto extents = table[made.data].shape.extents();
  extents.back() *= 2;  // on overflow the kernel rejects the shape
  auto expected = extents;
  expected.back() = ceil_div(expected.back(), simd::mx_block);
  if (scale.shape != Shape(expected)) {
    refuse(made, "q.scale_shape", "does not have one scale for each 32 values of a row",
           {scale.name}, scale.shape.text(), Shape(std::move(expected)).text());
    return;
  }
  set_decoding(
      table, made, "mxfp4",
      {"fp4_block", {made.data, made.scales.front()}, Shape(std::move(extents)), Dtype::bf16});
}

// The dtype of the scales, F8_E8M0, distinguishes these names from those of other programs.
std::optional<QuantizedTensor> recognise(const TensorTable& table, std::uint32_t tensor) {
  const TensorInfo& data = table[tensor];
  const bool is_fp4 = is_dtype(data, {Dtype::i8});
  if (!data.name.ends_with(".weight") || data.shape.rank() < 2) return std::nullopt;
  if (!is_fp4 && !is_dtype(data, {Dtype::f8_e4m3})) return std::nullopt;
  const auto scale = table.find(without_suffix(data.name, "weight") + "scale");
  if (scale == TensorTable::none || !is_dtype(table[scale], {Dtype::f8_e8m0})) return std::nullopt;
  QuantizedTensor made = quantized_tensor(data.name, tensor, {scale});
  if (is_fp4) {
    decode_experts(table, made);
  } else {
    constexpr scaled::BlockCodec blocks = {"fp8-block", "fp8_block", "fp8_block_128"};
    scaled::decode_blocks(table, made, blocks, {{}, {tensor, scale}, data.shape, Dtype::bf16});
  }
  return made;
}

}  // namespace

extern const Family deepseek_v4_family = {.recognise = recognise};

}  // namespace loadstone
