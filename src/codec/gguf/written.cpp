// The GGUF block encodings that loadstone writes. See docs/formats/gguf-blocks.md
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "codec/gguf/gguf.h"
#include "codec/scaled/scaled.h"
#include "kernels/gguf.h"

namespace loadstone {

namespace {

// The only dialect: the bytes of ggml's reference code.
constexpr std::array<std::string_view, 1> dialects = {"ggml"};

std::optional<Problem> check_importance(const Quantization& quantization,
                                        const QuantizedLayout& form, BlockFormat format) {
  if (quantization.importance == nullptr) {
    if (!needs_importance(format)) return std::nullopt;
    return Problem{"this encoding needs an importance matrix", "none", "--imatrix"};
  }
  const std::vector<float>& all = *quantization.importance;
  if (all.size() != form.columns && all.size() != form.columns * form.stack) {
    return Problem{"the importance matrix has a different number of columns",
                   fmt::format("{}", all.size()), fmt::format("{}", form.columns)};
  }
  const auto is_wrong = [](float each) { return !(std::isfinite(each) && each >= 0); };
  const auto wrong = std::ranges::find_if(all, is_wrong);
  if (wrong == all.end()) return std::nullopt;
  return Problem{"the importance matrix has a value that is negative or not finite",
                 fmt::format("{}", *wrong), "finite values of 0 or more"};
}

template <BlockFormat format>
std::optional<Problem> prepare_block_format(const Quantization& quantization, const Shape& shape,
                                            QuantizedLayout& form) {
  if (auto problem = scaled::begin_encoding(quantization, shape, form)) return problem;
  const BlockLayout block = layout(format);
  if (form.columns % block.elements != 0) {
    return Problem{
        fmt::format("a row does not consist of whole blocks of {} values", block.elements),
        shape.text(), fmt::format("a multiple of {} columns", block.elements)};
  }
  if (auto problem = check_importance(quantization, form, format)) return problem;
  form.block = format;
  form.importance = quantization.importance;
  const bool takes_rows = form.importance != nullptr && asks_for_row(format);
  form.window_elements = takes_rows ? form.columns : block.elements;
  form.parts = {{"data", shape_of_bytes(format, shape), Dtype::u8}};
  return std::nullopt;
}

// The scale of a matrix is a separate tensor.
std::optional<Problem> prepare_nvfp4(const Quantization& quantization, const Shape& shape,
                                     QuantizedLayout& form) {
  if (auto problem = prepare_block_format<BlockFormat::nvfp4>(quantization, shape, form)) {
    return problem;
  }
  if (shape.rank() > 3) {
    return Problem{"a tensor of four or more dimensions has no scale for each matrix", shape.text(),
                   "at most three dimensions"};
  }
  form.needs_amax = true;
  form.parts.push_back({"scale", scaled::with_last(shape, 2, {}), Dtype::f32});
  return std::nullopt;
}

constexpr std::array names = {ComponentName{"data", "weight"},
                              ComponentName{"scale", "scale", ComponentShape::one}};

template <BlockFormat format>
constexpr WrittenEncoding written_as(std::string_view name, unsigned bits,
                                     float typical_error = 0) {
  return {
      .name = name,
      .kind = QuantizeKind::gguf_blocks,
      .bits = bits,
      .code_type = "int",
      .kernel = "gguf",
      .prepare = prepare_block_format<format>,
      .gguf_names = std::span(names).first(1),
      .typical_error = typical_error,
      .dialects = dialects,
      .needs_importance = needs_importance(format),
  };
}

constexpr std::array written = {
    written_as<BlockFormat::q4_0>("q4_0", 4, 0.0860F),
    written_as<BlockFormat::q4_1>("q4_1", 4, 0.0783F),
    written_as<BlockFormat::q5_0>("q5_0", 5, 0.0427F),
    written_as<BlockFormat::q5_1>("q5_1", 5, 0.0378F),
    written_as<BlockFormat::q8_0>("q8_0", 8, 0.0053F),
    written_as<BlockFormat::q2_k>("q2_k", 2, 0.2970F),
    written_as<BlockFormat::q3_k>("q3_k", 3, 0.1510F),
    written_as<BlockFormat::q4_k>("q4_k", 4, 0.0713F),
    written_as<BlockFormat::q5_k>("q5_k", 5, 0.0361F),
    written_as<BlockFormat::q6_k>("q6_k", 6, 0.0177F),
    written_as<BlockFormat::iq1_s>("iq1_s", 1),
    written_as<BlockFormat::iq1_m>("iq1_m", 1),
    written_as<BlockFormat::iq2_xxs>("iq2_xxs", 2),
    written_as<BlockFormat::iq2_xs>("iq2_xs", 2),
    written_as<BlockFormat::iq2_s>("iq2_s", 2),
    written_as<BlockFormat::iq3_xxs>("iq3_xxs", 3),
    written_as<BlockFormat::iq3_s>("iq3_s", 3, 0.1660F),
    written_as<BlockFormat::iq4_nl>("iq4_nl", 4, 0.0761F),
    written_as<BlockFormat::iq4_xs>("iq4_xs", 4, 0.0767F),
    written_as<BlockFormat::tq1_0>("tq1_0", 2, 0.8080F),
    written_as<BlockFormat::tq2_0>("tq2_0", 2, 0.8080F),
    written_as<BlockFormat::mxfp4>("mxfp4-gguf", 4, 0.1149F),
    WrittenEncoding{.name = "nvfp4-gguf",
                    .kind = QuantizeKind::nvfp4_gguf,
                    .bits = 4,
                    .code_type = "float",
                    .kernel = "gguf_scaled",
                    .prepare = prepare_nvfp4,
                    .gguf_names = names,
                    .typical_error = 0.0952F,
                    .dialects = dialects},
};

constexpr auto encodings = [] {
  std::array<std::string_view, written.size()> all;
  for (std::size_t i = 0; i < written.size(); ++i) all[i] = written[i].name;
  return all;
}();

}  // namespace

std::span<const WrittenEncoding> gguf_written() noexcept { return written; }

std::span<const std::string_view> gguf_encodings() noexcept { return encodings; }

}  // namespace loadstone
