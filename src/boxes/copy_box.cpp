#include "boxes/copy_box.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace loadstone {

namespace {

// Edge of a square tile, in elements. A tile's rows are whole cache lines on both sides, and a tile
// with its cast copy fits into the first-level cache.
constexpr std::uint64_t tile_edge = 32;

struct Sides {
  const std::byte* source;
  std::byte* target;
};

// Number of elements that are cast at a time: few enough to be in the L1 cache when overflows are
// counted.
constexpr std::uint64_t counted_elements = 2048;

// Parameters of a copy, and the overflow that it counted.
struct Copy {
  Cast cast;
  std::size_t source_bytes;
  std::size_t target_bytes;
  Overflow overflow{};

  void run(const std::byte* from, std::byte* to, std::uint64_t count) noexcept {
    if (cast.overflow == nullptr) return cast.run(from, to, count);
    if (cast.watched != nullptr) {
      if (cast.watched(from, to, count)) overflow += cast.overflow(from, 1, count);
      return;
    }
    while (count > 0) {
      const std::uint64_t some = std::min(count, counted_elements);
      overflow += cast.overflow(from, 1, some);
      cast.run(from, to, some);
      from += some * source_bytes;
      to += some * target_bytes;
      count -= some;
    }
  }

  void strided(Sides at, const BoxDim& dim) noexcept {
    if (cast.overflow != nullptr) {
      overflow += cast.overflow(at.source, dim.source_stride, dim.extent);
    }
    cast.strided(at.source, dim.source_stride, at.target, dim.target_stride, dim.extent);
  }
};

template <std::size_t size>
void transpose_tile(const std::byte* source, std::uint64_t source_step, std::byte* target,
                    std::uint64_t target_step, std::uint64_t rows, std::uint64_t columns) noexcept {
  for (std::uint64_t row = 0; row < rows; ++row) {
    std::byte* to = target + row * target_step;
    const std::byte* from = source + row * size;
    for (std::uint64_t column = 0; column < columns; ++column) {
      std::memcpy(to + column * size, from + column * source_step, size);
    }
  }
}

void transpose_tile(std::size_t size, const std::byte* source, std::uint64_t source_step,
                    std::byte* target, std::uint64_t target_step, std::uint64_t rows,
                    std::uint64_t columns) noexcept {
  switch (size) {
    case 1:
      return transpose_tile<1>(source, source_step, target, target_step, rows, columns);
    case 2:
      return transpose_tile<2>(source, source_step, target, target_step, rows, columns);
    case 4:
      return transpose_tile<4>(source, source_step, target, target_step, rows, columns);
    case 8:
      return transpose_tile<8>(source, source_step, target, target_step, rows, columns);
    default:
      static_assert(element_bytes_max == 16);
      return transpose_tile<16>(source, source_step, target, target_step, rows, columns);
  }
}

// Copies a matrix of which the source is contiguous along `down` and the target along `across`.
// Casts the source's runs of each tile with vectors, and then transposes the tile.
void copy_transposed(Copy& copy, const BoxDim& down, const BoxDim& across, Sides at) noexcept {
  alignas(64) std::array<std::byte, tile_edge * tile_edge * element_bytes_max> tile;
  const std::uint64_t source_step = across.source_stride * copy.source_bytes;
  const std::uint64_t target_step = down.target_stride * copy.target_bytes;
  const std::uint64_t tile_step = tile_edge * copy.target_bytes;
  for (std::uint64_t row = 0; row < down.extent; row += tile_edge) {
    const std::uint64_t rows = std::min(tile_edge, down.extent - row);
    for (std::uint64_t column = 0; column < across.extent; column += tile_edge) {
      const std::uint64_t columns = std::min(tile_edge, across.extent - column);
      const std::byte* from = at.source + row * copy.source_bytes + column * source_step;
      std::byte* to = at.target + row * target_step + column * copy.target_bytes;
      for (std::uint64_t c = 0; c < columns; ++c) {
        copy.run(from + c * source_step, tile.data() + c * tile_step, rows);
      }
      transpose_tile(copy.target_bytes, tile.data(), tile_step, to, target_step, rows, columns);
    }
  }
}

void copy_inner(Copy& copy, std::span<const BoxDim> dims, Sides at) noexcept {
  if (dims.empty()) return copy.run(at.source, at.target, 1);
  const BoxDim& dim = dims.front();
  if (dims.size() == 2) return copy_transposed(copy, dim, dims[1], at);
  if (dim.source_stride == 1 && dim.target_stride == 1) {
    return copy.run(at.source, at.target, dim.extent);
  }
  copy.strided(at, dim);
}

}  // namespace

Overflow copy_box(std::span<const BoxDim> dims, const Cast& cast, const std::byte* source,
                  std::size_t source_bytes, std::byte* target, std::size_t target_bytes) noexcept {
  BoxDims sorted;
  for (const BoxDim& dim : dims) {
    if (dim.extent == 0 || !sorted.append(dim)) return {};
  }
  sorted.sort_by_target();
  std::span<BoxDim> outer = sorted.dims();
  // The inner dimensions are the last one and, if different, the one along which the source is
  // contiguous.
  std::size_t inner_count = std::min<std::size_t>(outer.size(), 1);
  if (outer.size() >= 2 && outer.back().target_stride == 1 && outer.back().source_stride != 1) {
    const auto run =
        std::ranges::find(outer.first(outer.size() - 1), std::uint64_t{1}, &BoxDim::source_stride);
    if (run != outer.end() - 1) {
      std::rotate(run, run + 1, outer.end() - 1);
      inner_count = 2;
    }
  }
  const std::span<const BoxDim> inner = outer.last(inner_count);
  outer = outer.first(outer.size() - inner_count);
  Copy copy = {.cast = cast, .source_bytes = source_bytes, .target_bytes = target_bytes};
  std::array<std::uint64_t, box_rank_max> index = {};
  Sides at = {.source = source, .target = target};
  for (;;) {
    copy_inner(copy, inner, at);
    std::size_t d = outer.size();
    for (; d > 0; --d) {
      const BoxDim& dim = outer[d - 1];
      if (++index[d - 1] < dim.extent) {
        at.source += dim.source_stride * source_bytes;
        at.target += dim.target_stride * target_bytes;
        break;
      }
      at.source -= (dim.extent - 1) * dim.source_stride * source_bytes;
      at.target -= (dim.extent - 1) * dim.target_stride * target_bytes;
      index[d - 1] = 0;
    }
    if (d == 0) return copy.overflow;
  }
}

}  // namespace loadstone
