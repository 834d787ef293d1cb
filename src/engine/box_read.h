// Describes the source bytes that a box needs, and how the engine reads them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "boxes/check_boxes.h"
#include "boxes/dims.h"
#include "boxes/merges.h"
#include "boxes/value.h"
#include "codec/decode.h"
#include "loadstone/byte_range.h"
#include "loadstone/error.h"
#include "loadstone/storage.h"

namespace loadstone {

// Maximum gap between two pieces that are read directly into their destinations in one call. The
// bytes in the gap are read and discarded, because a second call costs more.
inline constexpr std::uint64_t skipped_bytes_max = 4096;
// Maximum gap between two staged pieces. The bytes in the gap are read into the slot.
inline constexpr std::uint64_t staged_hole_bytes_max = 64 << 10;

// A box with at least one element, with its dimensions sorted by source stride. Members count
// elements, or bytes if an element is smaller than a byte. In the latter case only contiguous runs
// can be copied.
struct BoxRead {
  std::uint32_t source = 0;            // index into Catalog::tensors()
  const Decoding* decoding = nullptr;  // null: copies the source's bytes
  std::uint64_t source_offset = 0;
  std::uint64_t target_offset = 0;
  std::uint64_t source_bytes = 0;  // of one element, once it is decoded
  std::uint64_t target_bytes = 0;
  BoxDims dims;
  bool is_direct = false;  // read directly into its destination
  bool is_transposed = false;
  InnerRun run;  // contiguous elements that are read together

  // Returns the range of source elements that contains the whole box.
  [[nodiscard]] ElementRange elements() const noexcept;
  // Returns the number of runs; UINT64_MAX on overflow.
  [[nodiscard]] std::uint64_t runs() const noexcept;
};

// Checks a box that is not empty, before memory is written. Throws Error "plan.box" if the box
// exceeds its source or its target, or needs a cast that has no kernel.
[[nodiscard]] BoxRead check_box(const ValueSet& values, const Value& value, const Box& box);
// Returns nullopt for an empty box, and for a box that the engine rejects. `target` is the final
// dtype. `form` receives the prepared decoding, if the box has one.
[[nodiscard]] std::optional<BoxRead> box_read(const ValueSet& values, const Box& box, Dtype target,
                                              PreparedDecoder& form);

// Calls `visit` for each source of these elements of the box, with the source's index and its byte
// range in the shard.
template <typename Visit>
void visit_sources(const ValueSet& values, const BoxRead& read, const PreparedDecoder& form,
                   ElementRange elements, const Visit& visit) {
  const auto found = [&](std::uint32_t source, std::uint64_t begin, std::uint64_t end) {
    const std::uint64_t first = values.tensors()[source].offset_begin;
    if (begin < end) visit(source, ByteRange{first + begin, first + end});
  };
  if (read.decoding == nullptr) {
    return found(read.source, elements.begin * read.source_bytes, elements.end * read.source_bytes);
  }
  for (std::size_t i = 0; i < read.decoding->sources.size(); ++i) {
    const auto part = form.part_bytes(i, elements.begin, elements.end);
    found(read.decoding->sources[i], part.begin, part.end);
  }
}

// Visits the first element of each run.
template <typename Visit>
void visit_runs(std::span<const BoxDim> outer, std::uint64_t begin, const Visit& visit) {
  if (outer.empty()) return visit(begin);
  for (std::uint64_t i = 0; i < outer.front().extent; ++i) {
    visit_runs(outer.subspan(1), begin + i * outer.front().source_stride, visit);
  }
}

// Visits all boxes of a value, including those of its merge, each with its result's dtype.
template <typename Visit>
void visit_boxes(const Value& value, const Visit& visit) {
  const Dtype dtype = value.merge == nullptr ? value.dtype : Dtype::f32;
  for_each_box(value, [&](const Box& box) { visit(box, dtype); });
}

// Returns the source bytes of these values as disjoint ranges in file order. Bytes that no value
// needs are included only in gaps that one read spans. Short pieces that are far apart, such as
// columns, are omitted, because requesting a piece ahead would cost as much as reading it.
[[nodiscard]] std::vector<ShardRange> planned_reads(const ValueSet& values,
                                                    std::span<const std::uint32_t> numbers);

// The byte range of a shard that contains everything a value needs of one source.
struct SourceExtent {
  std::uint32_t source = 0;
  std::uint64_t begin = 0;  // in the shard
  std::uint64_t end = 0;
};

// Rethrows the error, and adds the file, tensor and offset if the error lacks them.
[[noreturn]] void rethrow_named(const Error& error, const Shard& shard, std::uint64_t offset,
                                std::string_view tensor);
// Reads bytes of a tensor. Throws Error that names the file, tensor and offset.
void read_source(const ValueSet& values, std::span<const std::shared_ptr<ByteSource>> shards,
                 std::uint32_t source, ByteRange bytes, std::byte* to);

// Returns one extent per source of the value, in the order of first use.
[[nodiscard]] std::vector<SourceExtent> source_extents(const ValueSet& values, const Value& value);

}  // namespace loadstone
