#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <optional>
#include <utility>

#include "base/ceil_div.h"
#include "codec/scaled/scaled.h"

namespace loadstone::scaled {

namespace {

using Block = std::array<std::uint64_t, 2>;

constexpr Block usual = {128, 128};

// Returns the last two extents of a shape.
Block grid_of(const Shape& shape) { return {shape[shape.rank() - 2], shape[shape.rank() - 1]}; }

std::optional<Block> claimed_block(const QuantizationClaim& claim, const Block& matrix,
                                   const Block& grid) {
  if (claim.block) return claim.block;
  if (claim.group_size.value_or(0) == 0 || grid[0] != matrix[0]) return std::nullopt;
  return Block{1, std::min(*claim.group_size, std::max<std::uint64_t>(matrix[1], 1))};
}

bool divides(const Block& grid, const Block& matrix) {
  return grid[0] != 0 && grid[1] != 0 && matrix[0] % grid[0] == 0 && matrix[1] % grid[1] == 0;
}

// Returns true if block sizes are whole extents or powers of two. Other sizes are not in use, even
// if they divide the matrix.
bool has_usual_extents(const Block& grid, const Block& matrix) {
  if (!divides(grid, matrix)) return false;
  const Block size = {matrix[0] / grid[0], matrix[1] / grid[1]};
  const auto is_usual = [&](std::size_t i) {
    return size[i] == matrix[i] || std::has_single_bit(size[i]);
  };
  return is_usual(0) && is_usual(1);
}

}  // namespace

void decode_blocks(const TensorTable& table, QuantizedTensor& made, const BlockCodec& codec,
                   Decoding decoding) {
  const TensorInfo& codes = table[decoding.sources[0]];
  const TensorInfo& scales = table[decoding.sources[1]];
  decoding.kernel = codec.even;
  const auto decode = [&] { set_decoding(table, made, codec.encoding, std::move(decoding)); };
  if (scales.shape.rank() < 2) return decode();
  const Block matrix = grid_of(codes.shape);
  const Block grid = grid_of(scales.shape);
  const auto claimed = claimed_block(table.claim(), matrix, grid);
  if (claimed && (*claimed)[0] == 0) {
    refuse(made, "plan.encoding", "has blocks, but the config gives several block sizes",
           {codes.name, scales.name});
    return;
  }
  const Block size = claimed.value_or(usual);
  const Block wanted = {ceil_div(matrix[0], size[0]), ceil_div(matrix[1], size[1])};
  const bool has_blocks = grid == wanted;
  const bool is_one_for_several = grid == Block{1, 1} && !has_blocks;
  if (is_one_for_several || (!has_blocks && (claimed || !has_usual_extents(grid, matrix)))) {
    refuse(made, "q.scale_shape",
           is_one_for_several ? "has only one scale, but several blocks"
           : claimed          ? "has a number of scales that does not fit the config's block size"
                     : "has scales that do not fit blocks of 128 by 128, and no config gives a "
                       "different block size",
           {scales.name}, scales.shape.text(), Shape({wanted[0], wanted[1]}).text());
    return;
  }
  if (has_blocks && size == usual && scales.shape.rank() == codes.shape.rank()) {
    decoding.kernel = codec.by_128;
  } else if (claimed && (matrix[0] % size[0] != 0 || matrix[1] % size[1] != 0)) {
    refuse(made, "plan.encoding",
           "has incomplete blocks at its edges, of a block size for which loadstone does not "
           "support this",
           {codes.name, scales.name}, fmt::format("{} by {}", size[0], size[1]));
    return;
  }
  decode();
}

}  // namespace loadstone::scaled
