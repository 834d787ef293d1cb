#include <algorithm>
#include <utility>
#include <vector>

#include "codec/scaled/scaled.h"

namespace loadstone::scaled {

namespace {

QuantizeDialect dialect_of(std::string_view name) noexcept {
  if (name == "modelopt-compat") return QuantizeDialect::compressed;
  return name == "modelopt-export" ? QuantizeDialect::exported : QuantizeDialect::exact;
}

}  // namespace

std::optional<Problem> begin_encoding(const Quantization& quantization, const Shape& shape,
                                      QuantizedLayout& form) {
  form.dialect = dialect_of(quantization.dialect);
  if (quantization.nested) {
    return Problem{quantization.encoding + " does not support nested scales"};
  }
  if (shape.rank() == 0 || form.elements == 0) {
    return Problem{"the matrix has no rows", shape.text(), "[..., rows, columns]"};
  }
  form.columns = shape[shape.rank() - 1];
  form.rows = shape.rank() > 1 ? shape[shape.rank() - 2] : 1;
  form.stack = form.elements / form.rows / form.columns;
  return std::nullopt;
}

std::optional<Problem> begin_matrices(const Quantization& quantization, const Shape& shape,
                                      QuantizedLayout& form) {
  if (auto problem = begin_encoding(quantization, shape, form)) return problem;
  if (shape.rank() > 1) return std::nullopt;
  return Problem{"this encoding quantizes only matrices", shape.text(), "[..., rows, columns]"};
}

Shape with_last(const Shape& shape, std::size_t taken,
                std::initializer_list<std::uint64_t> others) {
  std::vector<std::uint64_t> extents = shape.extents();
  extents.resize(extents.size() - std::min(taken, extents.size()));
  extents.insert(extents.end(), others.begin(), others.end());
  return Shape(std::move(extents));
}

Dtype scale_dtype(const QuantizedLayout& form) noexcept {
  return form.dialect == QuantizeDialect::compressed ? form.dtype : Dtype::f32;
}

std::uint64_t window_of_blocks(const QuantizedLayout& form, std::uint64_t block) noexcept {
  return form.columns % block == 0 ? block : form.columns;
}

}  // namespace loadstone::scaled
