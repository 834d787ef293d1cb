#include "formats/dcp_tiling.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <utility>

namespace loadstone {

namespace {

using Chunks = std::vector<const DcpChunk*>;

// Maximum number of chunks that do not form a grid, because comparing them in pairs takes quadratic
// time. The chunks that device meshes yield form grids.
constexpr std::size_t irregular_max = 4096;

std::uint64_t end_of(const DcpChunk& chunk, std::size_t dim) {
  return chunk.offsets[dim] + chunk.sizes[dim];
}

// Returns true if the chunks form consecutive slabs along `dim`, each tiled along the dims after
// it. Recurses at most `rank` deep, and sorts at each level.
bool is_grid(const Shape& shape, Chunks::iterator begin, Chunks::iterator end, std::size_t dim) {
  if (dim == shape.rank()) return end - begin == 1;
  const auto offset = [dim](const DcpChunk* chunk) { return chunk->offsets[dim]; };
  std::sort(begin, end, [&](const auto* a, const auto* b) { return offset(a) < offset(b); });
  std::uint64_t at = 0;
  while (begin != end) {
    if (offset(*begin) != at) return false;
    const std::uint64_t slab_end = end_of(**begin, dim);
    auto next = begin;
    for (; next != end && offset(*next) == at; ++next) {
      if (end_of(**next, dim) != slab_end) return false;
    }
    if (!is_grid(shape, begin, next, dim + 1)) return false;
    at = slab_end;
    begin = next;
  }
  return at == shape[dim];
}

bool overlap(const DcpChunk& a, const DcpChunk& b) {
  for (std::size_t d = 0; d < a.offsets.size(); ++d) {
    if (a.offsets[d] >= end_of(b, d) || b.offsets[d] >= end_of(a, d)) return false;
  }
  return true;
}

std::string chunk_text(const DcpChunk& chunk) {
  return fmt::format("{} at {}", chunk.sizes.text(), Shape(chunk.offsets).text());
}

}  // namespace

void check_dcp_chunks(const std::string& path, const DcpTensor& tensor) {
  const auto bad = [&](const char* code, std::string message, std::string found,
                       std::string expected) {
    refuse(path, {code, std::move(message), "chunks", std::move(found), std::move(expected)},
           tensor.name);
  };
  const std::uint64_t numel = tensor.shape.numel().value_or(0);
  if (numel == 0) return;
  Chunks chunks;
  for (const DcpChunk& chunk : tensor.chunks) chunks.push_back(&chunk);
  if (is_grid(tensor.shape, chunks.begin(), chunks.end(), 0)) return;
  for (std::size_t i = 0; i < std::min(chunks.size(), irregular_max); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (!overlap(*chunks[i], *chunks[j])) continue;
      bad("dcp.overlap", "two chunks contain the same elements of the tensor",
          chunk_text(*chunks[i]) + " and " + chunk_text(*chunks[j]), "each element in one chunk");
    }
  }
  std::uint64_t held = 0;  // at most numel, because no chunks overlap
  for (const DcpChunk* chunk : chunks) {
    const std::uint64_t more = chunk->sizes.numel().value_or(0);
    held = more > numel - held ? numel + 1 : held + more;
    if (held > numel) break;
  }
  if (held < numel) {
    bad("dcp.hole", "some elements of the tensor are in no chunk",
        fmt::format("{} of {} elements", held, numel), "all of them");
  }
  if (chunks.size() > irregular_max) {
    bad("dcp.unsupported", "the tensor's chunks do not form a grid, and there are too many of them",
        std::to_string(chunks.size()), fmt::format("at most {}", irregular_max));
  }
}

}  // namespace loadstone
