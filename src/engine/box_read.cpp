#include "engine/box_read.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "base/checked.h"
#include "boxes/direct_read.h"
#include "boxes/sources.h"
#include "codec/tensor_table.h"
#include "kernels/cast.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

// A piece of at least this size is worth a separate read request.
constexpr std::uint64_t apart_bytes_min = 256 << 10;

// Sorts the ranges, and joins neighbouring ranges that one read can cover.
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

// Returns the reason why the box is invalid, or an empty string.
std::string fill_read(const ValueSet& values, const Box& box, std::uint64_t elements, Dtype target,
                      BoxRead& read) {
  const auto& tensors = values.tensors();
  if (auto defect = box_defect(box, elements, tensors, values.decodings)) {
    return std::move(defect->message);
  }
  const Encoding encoding = encoding_of(box, tensors, values.decodings);
  if (!encoding.is_dtype()) return "blocks of quantized values cannot be copied as single values";
  const Dtype stored = encoding.dtype();
  read.source_bytes = element_bytes(stored);
  read.target_bytes = element_bytes(target);
  const Box* counted = &box;
  std::optional<Box> run;
  if (read.source_bytes == 0 && stored == target) {
    run = as_bytes(box, bits(stored));
    if (!run) return "values that share a byte cannot be copied separately";
    counted = &*run;
    read.source_bytes = read.target_bytes = 1;
  }
  read.source = box.source;
  if (box.decoding != no_decoding) read.decoding = &values.decodings[box.decoding];
  read.source_offset = counted->source_offset;
  read.target_offset = counted->target_offset;
  read.dims = BoxDims::by_source(*counted);
  const auto dims = std::as_const(read.dims).dims();
  read.is_direct =
      read.decoding == nullptr && stored == target && reads_directly(dims, read.source_bytes);
  read.is_transposed = !read.is_direct && transposes(dims);
  const std::uint64_t hole_max = read.is_direct ? skipped_bytes_max : staged_hole_bytes_max;
  read.run = source_run(dims, hole_max / std::max<std::uint64_t>(read.source_bytes, 1));
  return {};
}

bool has_cast(const ValueSet& values, const Box& box, Dtype target) {
  const Dtype stored = encoding_of(box, values.tensors(), values.decodings).dtype();
  return stored == target || cast_between(stored, target).run != nullptr;
}

}  // namespace

ElementRange BoxRead::elements() const noexcept {
  ElementRange range = {source_offset, source_offset + 1};
  for (const BoxDim& dim : dims.dims()) range.end += (dim.extent - 1) * dim.source_stride;
  return range;
}

std::uint64_t BoxRead::runs() const noexcept {
  std::uint64_t count = 1;
  for (const BoxDim& dim : dims.dims().first(run.outer_dims)) {
    count = saturating_mul(count, dim.extent);
  }
  return count;
}

BoxRead check_box(const ValueSet& values, const Value& value, const Box& box) {
  BoxRead read;
  std::string problem = fill_read(values, box, value.elements(), value.dtype, read);
  if (problem.empty() && !has_cast(values, box, value.dtype)) {
    problem = "the source's dtype cannot be cast to the target's";
  }
  if (problem.empty()) return read;
  Where where = {.tensor = std::string(value.name)};
  const auto& tensors = values.tensors();
  if (box.source < tensors.size()) {
    where.path = values.catalog.shards()[tensors[box.source].shard].path;
    where.field = tensors[box.source].name;
  }
  throw Error("plan.box", std::move(problem), std::move(where));
}

std::optional<BoxRead> box_read(const ValueSet& values, const Box& box, Dtype target,
                                PreparedDecoder& form) {
  std::optional<BoxRead> read(std::in_place);
  if (is_empty(box) || !fill_read(values, box, UINT64_MAX, target, *read).empty() ||
      (read->decoding != nullptr && check_decoding(values.tensors(), *read->decoding, form))) {
    return std::nullopt;
  }
  return read;
}

std::vector<ShardRange> planned_reads(const ValueSet& values,
                                      std::span<const std::uint32_t> numbers) {
  std::vector<ShardRange> reads;
  for (const std::uint32_t number : numbers) {
    visit_boxes(values[number], [&](const Box& box, Dtype dtype) {
      PreparedDecoder form;
      const auto read = box_read(values, box, dtype, form);
      if (!read) return;
      if (read->run.outer_dims > 0 && read->run.elements * read->source_bytes < apart_bytes_min) {
        return;
      }
      visit_runs(read->dims.dims().first(read->run.outer_dims), read->source_offset,
                 [&](std::uint64_t begin) {
                   visit_sources(values, *read, form, {begin, begin + read->run.elements},
                                 [&](std::uint32_t source, ByteRange bytes) {
                                   reads.push_back({values.tensors()[source].shard, bytes});
                                 });
                 });
    });
  }
  return joined(std::move(reads));
}

void rethrow_named(const Error& error, const Shard& shard, std::uint64_t offset,
                   std::string_view tensor) {
  Where where = error.where();
  if (where.path.empty()) where.path = shard.path;
  if (where.tensor.empty()) where.tensor = tensor;
  if (!where.byte_offset) where.byte_offset = offset;
  throw Error(error.code(), error.message(), std::move(where));
}

void read_source(const ValueSet& values, std::span<const std::shared_ptr<ByteSource>> shards,
                 std::uint32_t source, ByteRange bytes, std::byte* to) {
  const TensorInfo& tensor = values.tensors()[source];
  const std::uint64_t begin = tensor.offset_begin + bytes.begin;
  try {
    shards[tensor.shard]->read(begin, {to, bytes.size()});
  } catch (const Error& error) {
    rethrow_named(error, values.shard_of(source), begin, tensor.name);
  }
}

std::vector<SourceExtent> source_extents(const ValueSet& values, const Value& value) {
  std::vector<SourceExtent> extents;
  // Index in `extents` by source. Lacks the last extent.
  std::unordered_map<std::uint32_t, std::size_t> places;
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
  visit_boxes(value, [&](const Box& box, Dtype dtype) {
    PreparedDecoder form;
    if (const auto read = box_read(values, box, dtype, form)) {
      visit_sources(values, *read, form, read->elements(), add);
    }
  });
  if (!extents.empty()) return extents;
  // A tensor without elements has sources too, although no bytes of them are read.
  for (const std::uint32_t source : sources_of(value.boxes, values.decodings, value.merge)) {
    const std::uint64_t begin = values.tensors()[source].offset_begin;
    add(source, {begin, begin});
  }
  return extents;
}

}  // namespace loadstone
