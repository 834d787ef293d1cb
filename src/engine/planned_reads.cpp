#include "engine/planned_reads.h"

#include <algorithm>
#include <tuple>

#include "engine/box_read.h"

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

}  // namespace loadstone
