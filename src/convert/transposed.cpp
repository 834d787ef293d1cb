#include "convert/transposed.h"

#include <utility>
#include <vector>

#include "boxes/dims.h"

namespace loadstone {

namespace {

// Cut a dimension that runs over several rows into one of rows and one of columns. Returns false if
// a row ends in the middle of its steps.
bool add_cut(const BoxDim& dim, std::uint64_t columns, std::vector<BoxDim>& cut) {
  if (dim.target_stride % columns == 0 || dim.extent * dim.target_stride <= columns) {
    cut.push_back(dim);
    return true;
  }
  if (columns % dim.target_stride != 0) return false;
  const std::uint64_t per_row = columns / dim.target_stride;
  if (dim.extent % per_row != 0) return false;
  BoxDim rows = dim;
  rows.extent = dim.extent / per_row;
  rows.source_stride = dim.source_stride * per_row;
  rows.target_stride = columns;
  cut.push_back(rows);
  cut.push_back(dim);
  cut.back().extent = per_row;
  return true;
}

// The element [row, column] becomes [column, row].
bool transpose(Box& box, std::uint64_t rows, std::uint64_t columns) {
  std::vector<BoxDim> dims;
  for (const BoxDim& dim : box.dims) {
    if (!add_cut(dim, columns, dims)) return false;
  }
  std::uint64_t last_column = box.target_offset % columns;
  for (BoxDim& dim : dims) {
    if (dim.target_stride % columns == 0) {
      dim.target_stride /= columns;
    } else {
      last_column += (dim.extent - 1) * dim.target_stride;
      dim.target_stride *= rows;
    }
  }
  if (last_column >= columns) return false;
  box.target_offset = box.target_offset % columns * rows + box.target_offset / columns;
  normalise(dims);
  box.dims = std::move(dims);
  return true;
}

}  // namespace

bool transpose_recipe(TargetRecipe& recipe) {
  if (recipe.merge != nullptr || recipe.constant != nullptr || recipe.shape.rank() != 2) {
    return false;
  }
  const std::uint64_t rows = recipe.shape[0];
  const std::uint64_t columns = recipe.shape[1];
  if (rows == 0 || columns == 0) return false;
  std::vector<Box> boxes = recipe.boxes;
  for (Box& box : boxes) {
    if (!transpose(box, rows, columns)) return false;
  }
  recipe.boxes = std::move(boxes);
  recipe.shape = Shape({columns, rows});
  return true;
}

}  // namespace loadstone
