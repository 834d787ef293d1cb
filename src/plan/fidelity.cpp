#include "plan/fidelity.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "boxes/merges.h"
#include "codec/decode.h"
#include "codec/encode.h"
#include "codec/tensor_table.h"

namespace loadstone {

namespace {

struct Extents {
  std::uint64_t rows = 1;
  std::uint64_t columns = 1;
};

Extents matrix_of(const Shape& shape) noexcept {
  const std::size_t rank = shape.rank();
  return {rank < 2 ? 1 : shape[rank - 2], rank == 0 ? 1 : shape[rank - 1]};
}

// A box along one dimension of a matrix.
struct Axis {
  std::uint64_t source = 0;  // index of the first element
  std::uint64_t target = 0;
  std::uint64_t extent = 1;
  std::uint64_t source_extent = 1;  // of the whole matrix
  std::uint64_t target_extent = 1;
};

// `from`, `to`: extents of a block.
bool is_within(const Axis& axis, std::uint64_t from, std::uint64_t to) noexcept {
  const std::uint64_t step = std::min(to, axis.target_extent);
  if (step == 1) return true;
  const std::uint64_t end = axis.target + axis.extent;
  const bool has_whole_blocks =
      axis.target % step == 0 && (end % step == 0 || end == axis.target_extent);
  if (!has_whole_blocks) return false;
  const bool is_in_matrix = axis.source + axis.extent <= axis.source_extent;
  if (from >= axis.source_extent && is_in_matrix) return true;
  return std::min(from, axis.source_extent) % step == 0 && axis.source % step == 0 &&
         (is_in_matrix || axis.source_extent % step == 0);
}

// Returns true if blocks that run across rows do not span several rows.
bool keeps_to_rows(const BlockGrid& grid, const Extents& matrix) noexcept {
  return !grid.is_flat || matrix.columns % grid.columns == 0;
}

std::optional<BlockGrid> grid_of(std::string_view kernel, const std::vector<DecodePart>& parts,
                                 const Shape& shape) {
  PreparedDecoder form;
  if (prepare_decoding(kernel, parts, shape, Dtype::f32, 0, form)) return std::nullopt;
  return form.decoder->grid();
}

std::optional<BlockGrid> source_grid(const Plan& plan, const Box& box) {
  const auto& tensors = plan.catalog->tensors();
  if (box.decoding == no_decoding) {
    const TensorInfo& tensor = tensors[box.source];
    if (tensor.encoding.is_dtype()) return std::nullopt;
    return grid_of("gguf", {{tensor.encoding, tensor.shape}}, tensor.shape);
  }
  PreparedDecoder form;
  if (check_decoding(tensors, plan.decodings[box.decoding], form)) return std::nullopt;
  return form.decoder->grid();
}

const Shape& source_shape(const Plan& plan, const Box& box) {
  return box.decoding == no_decoding ? plan.catalog->tensors()[box.source].shape
                                     : plan.decodings[box.decoding].shape;
}

// Returns nullopt if the encoder does not search for exact scales.
std::optional<BlockGrid> target_grid(const PlannedTarget& target) {
  QuantizedLayout form;
  const Quantization& quantization = *target.quantization;
  if (prepare_quantization(quantization, target.shape, target.dtype, form) || !form.exact_first) {
    return std::nullopt;
  }
  std::vector<DecodePart> parts;
  for (const QuantizedPart& part : form.parts) parts.push_back({part.dtype, part.shape});
  const WrittenEncoding& encoding = written_encoding(quantization);
  if (encoding.is_gguf()) parts = {{form.block, target.shape}};
  return grid_of(encoding.kernel, parts, target.shape);
}

// Returns true if all values of a float dtype are values of another.
bool holds(Dtype to, Dtype from) noexcept {
  if (to == from) return true;
  const FloatFormat& wide = dtype_info(to).format;
  const FloatFormat& narrow = dtype_info(from).format;
  return narrow.digits > 0 && wide.digits >= narrow.digits && wide.largest >= narrow.largest &&
         wide.smallest <= narrow.smallest;
}

// Returns true if the dtype represents all products of codes and scales. Decoders compute in F32.
bool holds_products(Dtype to, const std::optional<BlockGrid>& grid) noexcept {
  if (to == Dtype::f32 || to == Dtype::f64) return true;
  if (to != Dtype::bf16 || !grid || grid->scale != Dtype::f8_e8m0) return false;
  // The smallest scale is 2^-127, and the smallest BF16 value is 2^-133.
  return std::ranges::all_of(grid->codes,
                             [](float code) { return code == 0 || std::abs(code) >= 0x1p-6F; });
}

}  // namespace

bool blocks_are_within(const Box& box, const Shape& source, const BlockGrid& from,
                       const Shape& target, const BlockGrid& to) noexcept {
  const Extents all = matrix_of(source);
  const Extents made = matrix_of(target);
  if (!keeps_to_rows(from, all) || !keeps_to_rows(to, made)) return false;
  BoxDim column = {.source_stride = 1};
  BoxDim row = {.source_stride = all.columns};
  for (const BoxDim& dim : box.dims) {
    if (dim.extent == 1) continue;
    if (dim.target_stride == 1) {
      column = dim;
    } else if (dim.target_stride == made.columns) {
      row = dim;
    } else if (dim.target_stride % made.columns != 0 || dim.source_stride % all.columns != 0) {
      return false;
    }
  }
  if (column.extent > made.columns) {  // rows that are adjacent in source and target
    if (column.source_stride != 1 || all.columns != made.columns) return false;
    row.extent = column.extent / made.columns;
    column.extent = made.columns;
  }
  const bool is_transposed = column.source_stride == all.columns && row.source_stride == 1;
  const bool has_rows = std::min(to.rows, made.rows) > 1;
  if (!is_transposed && (column.source_stride != 1 || row.source_stride % all.columns != 0 ||
                         (has_rows && row.source_stride != all.columns))) {
    return false;
  }
  const std::uint64_t source_row = box.source_offset / all.columns % all.rows;
  const std::uint64_t source_column = box.source_offset % all.columns;
  Axis columns = {source_column, box.target_offset % made.columns, column.extent, all.columns,
                  made.columns};
  Axis rows = {source_row, box.target_offset / made.columns % made.rows, row.extent, all.rows,
               made.rows};
  if (!is_transposed) {
    return is_within(columns, from.columns, to.columns) && is_within(rows, from.rows, to.rows);
  }
  std::swap(columns.source, rows.source);
  std::swap(columns.source_extent, rows.source_extent);
  return is_within(columns, from.rows, to.columns) && is_within(rows, from.columns, to.rows);
}

const Fidelities::Relation& Fidelities::relation(const BlockGrid& to, const BlockGrid& from) {
  const auto key = [](const BlockGrid& grid) {
    return Codes(grid.codes.data(), grid.codes.data() + grid.codes.size());
  };
  const auto [found, is_new] = relations_.try_emplace({key(to), key(from)});
  if (is_new && contains_codes(to, from)) found->second = {true, has_headroom(to, from)};
  return found->second;
}

Fidelity Fidelities::of_codes(const PlannedTarget& target) {
  const auto to = target_grid(target);
  if (!to) return Fidelity::lossy;
  const bool shares = !target.quantization->group.empty() ||
                      (target.recipe.boxes.size() > 1 && to->scale == Dtype::f8_e4m3);
  Fidelity worst = Fidelity::exact;
  for (const Box& box : target.recipe.boxes) {
    auto from = source_grid(plan_, box);
    if (!from) return Fidelity::lossy;
    if (!relation(*to, *from).is_contained) {
      from->codes = from->symmetric_codes;
      if (!relation(*to, *from).is_contained) return Fidelity::lossy;
      worst = Fidelity::exact_where_scales_fit;
    }
    const bool is_inside =
        blocks_are_within(box, source_shape(plan_, box), *from, target.shape, *to);
    if (!is_inside && !relation(*to, *from).has_headroom) return Fidelity::lossy;
    worst = std::max(worst, fidelity_of_scales(*from, *to, is_inside, shares));
  }
  return worst;
}

Fidelity Fidelities::of_floats(const PlannedTarget& target) const {
  const bool is_held = std::ranges::all_of(target.recipe.boxes, [&](const Box& box) {
    const Encoding stored = plan_.catalog->tensors()[box.source].encoding;
    const DecodeKernel* const kernel =
        box.decoding == no_decoding ? nullptr
                                    : find_decode_kernel(plan_.decodings[box.decoding].kernel);
    if (kernel != nullptr && kernel->makes_bytes) return true;  // codes that are moved
    const bool is_float = box.decoding == no_decoding && stored.is_dtype();
    return is_float ? holds(target.dtype, stored.dtype())
                    : holds_products(target.dtype, source_grid(plan_, box));
  });
  return is_held ? Fidelity::exact : Fidelity::lossy;
}

Fidelity Fidelities::of(const PlannedTarget& target) {
  if (target.recipe.merge != nullptr) return Fidelity::lossy;
  return target.quantization ? of_codes(target) : of_floats(target);
}

}  // namespace loadstone
