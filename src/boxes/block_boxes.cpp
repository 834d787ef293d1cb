#include "boxes/block_boxes.h"

#include <algorithm>
#include <cstdint>
#include <utility>

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

// Returns true if each row of the target is part of a column of the source, and the blocks of the
// target's rows are within those of the source's columns. The columns may be in any order.
bool rows_are_columns(const Box& box, const Extents& all, const BlockGrid& from,
                      const Extents& made, const BlockGrid& to) noexcept {
  if (std::min(to.rows, made.rows) > 1) return false;
  Axis row = {box.source_offset / all.columns % all.rows, box.target_offset % made.columns, 1,
              all.rows, made.columns};
  std::uint64_t last_column = box.source_offset % all.columns;
  for (const BoxDim& dim : box.dims) {
    if (dim.extent == 1) continue;
    if (dim.target_stride == 1) {
      if (dim.source_stride != all.columns) return false;
      row.extent = dim.extent;
    } else if (dim.target_stride % made.columns != 0) {
      return false;
    } else if (dim.source_stride % (all.rows * all.columns) != 0) {
      last_column += (dim.extent - 1) * dim.source_stride;
    }
  }
  return last_column < all.columns && is_within(row, from.rows, to.columns);
}

}  // namespace

bool blocks_are_within(const Box& box, const Shape& source, const BlockGrid& from,
                       const Shape& target, const BlockGrid& to) noexcept {
  const Extents all = matrix_of(source);
  const Extents made = matrix_of(target);
  if (!keeps_to_rows(from, all) || !keeps_to_rows(to, made)) return false;
  if (rows_are_columns(box, all, from, made, to)) return true;
  BoxDim column = {.source_stride = 1};
  BoxDim row = {.source_stride = all.columns};
  bool steps_matrices = true;  // true if all other dimensions step whole matrices
  for (const BoxDim& dim : box.dims) {
    if (dim.extent == 1) continue;
    if (dim.target_stride == 1) {
      column = dim;
    } else if (dim.target_stride == made.columns) {
      row = dim;
    } else if (dim.target_stride % made.columns != 0 || dim.source_stride % all.columns != 0) {
      return false;
    } else {
      steps_matrices = steps_matrices && dim.target_stride % (made.rows * made.columns) == 0 &&
                       dim.source_stride % (all.rows * all.columns) == 0;
    }
  }
  if (column.extent > made.columns) {  // rows that are adjacent in source and target
    if (column.source_stride != 1 || all.columns != made.columns) return false;
    row.extent = column.extent / made.columns;
    column.extent = made.columns;
  }
  const bool is_transposed = column.source_stride == all.columns && row.source_stride == 1;
  const bool has_rows = std::min(to.rows, made.rows) > 1;
  if (!steps_matrices && (is_transposed || has_rows)) return false;
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

}  // namespace loadstone
