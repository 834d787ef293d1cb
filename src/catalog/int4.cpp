#include "catalog/int4.h"

#include <utility>
#include <variant>

namespace loadstone {

namespace {

constexpr std::uint64_t block = 128;

}  // namespace

Int4Shapes int4_shapes(const Shape& weight, const Shape& scales) {
  Int4Shapes shapes;
  const std::size_t rank = weight.rank();
  if (rank < 2 || scales.rank() != rank || !weight.numel()) return shapes;
  for (std::size_t i = 0; i + 2 < rank; ++i) {
    if (weight[i] != scales[i]) return shapes;
  }
  const std::uint64_t rows = weight[rank - 2];
  const std::uint64_t columns = weight[rank - 1];
  const std::uint64_t bytes = rows * columns;  // part of a product that fits
  if (bytes > UINT64_MAX / 4 || bytes == 0) return shapes;
  auto extents = weight.extents();
  if (scales[rank - 1] == 1 && bytes % (block / 2) == 0 &&
      scales[rank - 2] == bytes / (block / 2)) {
    extents[rank - 1] = 2 * columns;
    shapes.blocks = Shape(extents);
    extents[rank - 1] = columns;
  }
  if (scales[rank - 2] == 2 * rows && columns % block == 0 && scales[rank - 1] == columns / block) {
    extents[rank - 2] = 2 * rows;
    shapes.row_pairs = Shape(std::move(extents));
  }
  return shapes;
}

std::string_view int4_encoding(const std::map<std::string, MetadataValue>& metadata) {
  const auto found = metadata.find(std::string(int4_metadata_key));
  if (found == metadata.end()) return {};
  const auto* const text = std::get_if<std::string>(&found->second.value);
  const bool is_known = text != nullptr && (*text == "int4" || *text == "int4-awq");
  return is_known ? std::string_view(*text) : std::string_view();
}

bool is_ambiguous_int4(std::string_view encoding, const Shape& shape) noexcept {
  if (shape.rank() < 2) return false;
  const std::uint64_t columns = shape[shape.rank() - 1];
  return (encoding == "int4" && columns == 2 * block) ||
         (encoding == "int4-awq" && columns == block);
}

}  // namespace loadstone
