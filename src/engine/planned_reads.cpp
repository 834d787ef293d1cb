#include "engine/planned_reads.h"

#include <algorithm>
#include <tuple>

#include "boxes/check_boxes.h"
#include "boxes/direct_read.h"
#include "boxes/merges.h"
#include "boxes/sources.h"
#include "codec/tensor_table.h"
#include "engine/limits.h"

namespace loadstone {

namespace {

// A piece that is worth a request of its own.
constexpr std::uint64_t apart_bytes_min = 256 << 10;

class PlannedReads {
 public:
  explicit PlannedReads(const ValueSet& values) : values_(values) {}

  void add(const Value& target) {
    for (const Box& box : target.boxes) add_box(box, target.dtype);
    if (target.merge == nullptr) return;
    for_each_operand(*target.merge, [&](const Operand& operand) {
      for (const Box& box : operand.boxes) add_box(box, Dtype::f32);
    });
  }

  std::vector<ShardRange> take() {
    std::ranges::sort(reads_, {}, [](const ShardRange& range) {
      return std::tuple(range.shard, range.bytes.begin, range.bytes.end);
    });
    std::vector<ShardRange> joined;
    for (const ShardRange& range : reads_) {
      if (!joined.empty() && joined.back().shard == range.shard &&
          range.bytes.begin <= joined.back().bytes.end + skipped_bytes_max) {
        joined.back().bytes.end = std::max(joined.back().bytes.end, range.bytes.end);
      } else {
        joined.push_back(range);
      }
    }
    return joined;
  }

 private:
  void add_box(const Box& box, Dtype dtype) {
    // Whoever reads it refuses one that leaves its source.
    const auto& tensors = values_.tensors();
    if (is_empty(box) || box_defect(box, UINT64_MAX, tensors, values_.decodings)) return;
    if (box.decoding == no_decoding) {
      const Encoding encoding = tensors[box.source].encoding;
      if (!encoding.is_dtype()) return;
      const Dtype stored = encoding.dtype();
      add_runs(box, stored, stored == dtype,
               [&](ElementRange range) { add_bytes(box.source, bytes_of(range, stored)); });
      return;
    }
    const Decoding& decoding = values_.decodings[box.decoding];
    DecodeForm form;
    if (check_decoding(tensors, decoding, form)) return;
    add_runs(box, decoding.dtype, false, [&](ElementRange range) {
      for (std::size_t i = 0; i < decoding.sources.size(); ++i) {
        const auto part = form.part_bytes(i, range.begin, range.end);
        add_bytes(decoding.sources[i], {part.begin, part.end});
      }
    });
  }

  // The box's elements, from one hole that is not read over to the next.
  template <typename Visit>
  static void add_runs(const Box& box, Dtype stored, bool is_same, const Visit& visit) {
    BoxDims sorted;
    for (const BoxDim& dim : box.dims) static_cast<void>(sorted.append(dim));
    sorted.sort_by_source();
    const auto dims = sorted.dims();
    const std::uint64_t width = std::max<std::uint64_t>(element_bytes(stored), 1);
    const InnerRun run = read_run(dims, width, is_same && reads_directly(dims, width));
    if (run.outer_dims > 0 && run.elements < apart_bytes_min / width) return;
    visit_runs(dims.first(run.outer_dims), box.source_offset, run.elements, visit);
  }

  template <typename Visit>
  static void visit_runs(std::span<const BoxDim> outer, std::uint64_t begin, std::uint64_t run,
                         const Visit& visit) {
    if (outer.empty()) return visit(ElementRange{begin, begin + run});
    for (std::uint64_t i = 0; i < outer.front().extent; ++i) {
      visit_runs(outer.subspan(1), begin + i * outer.front().source_stride, run, visit);
    }
  }

  void add_bytes(std::uint32_t source, ByteRange bytes) {
    if (bytes.size() == 0) return;
    const TensorInfo& tensor = values_.tensors()[source];
    reads_.push_back(
        {tensor.shard, {tensor.offset_begin + bytes.begin, tensor.offset_begin + bytes.end}});
  }

  const ValueSet& values_;
  std::vector<ShardRange> reads_;
};

}  // namespace

std::vector<ShardRange> planned_reads(const ValueSet& values,
                                      std::span<const std::uint32_t> targets) {
  PlannedReads reads(values);
  for (const std::uint32_t target : targets) reads.add(values[target]);
  return reads.take();
}

}  // namespace loadstone
