#include "engine/box_read.h"

#include <algorithm>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "base/checked.h"
#include "boxes/direct_read.h"
#include "boxes/sources.h"
#include "codec/tensor_table.h"

namespace loadstone {

namespace {

// A piece that is worth a request of its own.
constexpr std::uint64_t apart_bytes_min = 256 << 10;

// Sorts the ranges, and joins those that one read brings.
std::vector<ShardRange> joined(std::vector<ShardRange> reads) {
  std::ranges::sort(reads, {}, [](const ShardRange& range) {
    return std::tuple(range.shard, range.bytes.begin, range.bytes.end);
  });
  std::vector<ShardRange> joined;
  for (const ShardRange& range : reads) {
    if (!joined.empty() && joined.back().shard == range.shard &&
        range.bytes.begin <= joined.back().bytes.end + skipped_bytes_max) {
      joined.back().bytes.end = std::max(joined.back().bytes.end, range.bytes.end);
    } else {
      joined.push_back(range);
    }
  }
  return joined;
}

}  // namespace

std::optional<BoxRead> box_read(const ValueSet& values, const Box& box, Dtype target) {
  const auto& tensors = values.tensors();
  if (is_empty(box) || box_defect(box, UINT64_MAX, tensors, values.decodings)) return std::nullopt;
  std::optional<BoxRead> found(std::in_place);
  BoxRead& read = *found;
  read.box = &box;
  if (box.decoding != no_decoding) {
    read.decoding = &values.decodings[box.decoding];
    read.stored = read.decoding->dtype;
    if (check_decoding(tensors, *read.decoding, read.form)) return std::nullopt;
  } else {
    const Encoding encoding = tensors[box.source].encoding;
    if (!encoding.is_dtype()) return std::nullopt;
    read.stored = encoding.dtype();
  }
  read.dims = BoxDims::by_source(box);
  const auto dims = std::as_const(read.dims).dims();
  const std::uint64_t width = std::max<std::uint64_t>(element_bytes(read.stored), 1);
  read.is_direct = read.decoding == nullptr && read.stored == target && reads_directly(dims, width);
  read.is_transposed = transposes(dims);
  read.run = source_run(dims, (read.is_direct ? skipped_bytes_max : staged_hole_bytes_max) / width);
  for (const BoxDim& dim : dims.first(read.run.outer_dims)) {
    read.runs = saturating_mul(read.runs, dim.extent);
  }
  return found;
}

std::vector<ShardRange> planned_reads(const ValueSet& values,
                                      std::span<const std::uint32_t> targets) {
  std::vector<ShardRange> reads;
  for (const std::uint32_t target : targets) {
    visit_boxes(values[target], [&](const Box& box, Dtype dtype) {
      const auto read = box_read(values, box, dtype);
      if (!read) return;
      const std::uint64_t elements_min = apart_bytes_min * 8 / bits(read->stored);
      if (read->run.outer_dims > 0 && read->run.elements < elements_min) return;
      visit_runs(read->dims.dims().first(read->run.outer_dims), box.source_offset,
                 [&](std::uint64_t begin) {
                   visit_sources(values, *read, {begin, begin + read->run.elements},
                                 [&](std::uint32_t source, ByteRange bytes) {
                                   reads.push_back({values.tensors()[source].shard, bytes});
                                 });
                 });
    });
  }
  return joined(std::move(reads));
}

std::vector<SourceExtent> source_extents(const ValueSet& values, const Value& target) {
  std::vector<SourceExtent> extents;
  std::unordered_map<std::uint32_t, std::size_t> places;  // of those before the last one
  const auto add = [&](std::uint32_t source, ByteRange bytes) {
    if (extents.empty() || extents.back().source != source) {
      if (!extents.empty()) places.try_emplace(extents.back().source, extents.size() - 1);
      const auto known = places.find(source);
      if (known != places.end()) {
        SourceExtent& extent = extents[known->second];
        extent.begin = std::min(extent.begin, bytes.begin);
        extent.end = std::max(extent.end, bytes.end);
        return;
      }
      extents.push_back({source, bytes.begin, bytes.end});
    }
    extents.back().begin = std::min(extents.back().begin, bytes.begin);
    extents.back().end = std::max(extents.back().end, bytes.end);
  };
  visit_boxes(target, [&](const Box& box, Dtype dtype) {
    if (const auto read = box_read(values, box, dtype)) {
      visit_sources(values, *read, read->elements(), add);
    }
  });
  if (!extents.empty()) return extents;
  // A tensor without elements has sources too, of which no byte is read.
  for (const std::uint32_t source : sources_of(target.boxes, values.decodings, target.merge)) {
    const std::uint64_t begin = values.tensors()[source].offset_begin;
    add(source, {begin, begin});
  }
  return extents;
}

}  // namespace loadstone
