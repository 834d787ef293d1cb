// Which parts a value has in ModelOpt's encodings, and what is refused.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "kernels/modelopt.h"
#include "kernels/modelopt/scales.h"

namespace loadstone {

namespace {

struct Known {
  std::string_view name;
  QuantizeKind kind;
};
constexpr std::array known = {
    Known{"fp8", QuantizeKind::fp8},
    Known{"nvfp4", QuantizeKind::nvfp4},
};

std::optional<DecodeProblem> set_dialect(const Quantization& quantization, QuantizeForm& form) {
  const std::string& dialect = quantization.dialect;
  const bool is_fp8 = form.kind == QuantizeKind::fp8;
  if (dialect.empty() || dialect == "exact") {
    form.dialect = QuantizeDialect::exact;
  } else if (dialect == "modelopt-compat") {
    form.dialect = QuantizeDialect::compressed;
  } else if (dialect == "modelopt-export" && is_fp8) {
    form.dialect = QuantizeDialect::exported;
  } else {
    return DecodeProblem{
        "no such dialect", dialect,
        is_fp8 ? "exact, modelopt-compat or modelopt-export" : "exact or modelopt-compat"};
  }
  return std::nullopt;
}

// The shape with its last dimensions replaced: `taken` of them by `others`.
Shape with_last(const Shape& shape, std::size_t taken,
                std::initializer_list<std::uint64_t> others) {
  std::vector<std::uint64_t> extents = shape.extents();
  extents.resize(extents.size() - std::min(taken, extents.size()));
  extents.insert(extents.end(), others.begin(), others.end());
  return Shape(std::move(extents));
}

Dtype scale_dtype(const QuantizeForm& form) {
  return form.dialect == QuantizeDialect::compressed ? form.dtype : Dtype::f32;
}

void set_parts(const Shape& shape, QuantizeForm& form) {
  const std::uint64_t blocks = scaled::blocks_of_row(form);
  switch (form.kind) {
    case QuantizeKind::fp8:
      form.parts = {{"data", shape, Dtype::f8_e4m3},
                    {"scale", with_last(shape, 2, {}), scale_dtype(form)}};
      form.needs_amax = true;
      break;
    default:
      form.parts = {{"data", with_last(shape, 1, {blocks * 8}), Dtype::u8},
                    {"scale", with_last(shape, 1, {blocks}), Dtype::f8_e4m3},
                    {"scale_2", with_last(shape, 2, {}), Dtype::f32}};
      form.needs_amax = true;
      form.window_elements =
          form.columns % scaled::nvfp4_block == 0 ? scaled::nvfp4_block : form.columns;
      break;
  }
}

}  // namespace

std::optional<QuantizeKind> scaled_kind(std::string_view encoding) noexcept {
  const auto* const found = std::ranges::find(known, encoding, &Known::name);
  if (found == known.end()) return std::nullopt;
  return found->kind;
}

std::optional<DecodeProblem> prepare_scaled(const Quantization& quantization, const Shape& shape,
                                            QuantizeForm& form) {
  if (auto problem = set_dialect(quantization, form)) return problem;
  if (quantization.nested) {
    return DecodeProblem{quantization.encoding + " has no nested scales", {}, {}};
  }
  if (shape.rank() == 0 || form.elements == 0) {
    return DecodeProblem{"there are no rows to scale", shape.text(), "[..., rows, columns]"};
  }
  form.columns = shape[shape.rank() - 1];
  form.rows = shape.rank() > 1 ? shape[shape.rank() - 2] : 1;
  form.stack = form.elements / form.rows / form.columns;
  set_parts(shape, form);
  for (const QuantizedPart& part : form.parts) {
    const auto count = part.shape.numel();
    if (!count || !Encoding(part.dtype).byte_count(*count)) {
      return DecodeProblem{"the size does not fit 64 bits", shape.text(), {}};
    }
  }
  return std::nullopt;
}

}  // namespace loadstone
