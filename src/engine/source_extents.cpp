#include "engine/source_extents.h"

#include <algorithm>
#include <cstddef>
#include <unordered_map>
#include <utility>

#include "boxes/dims.h"
#include "boxes/merges.h"
#include "boxes/sources.h"
#include "codec/tensor_table.h"
#include "engine/walk.h"

namespace loadstone {

namespace {

// One extent a source, in the order in which they are met. Not thread-safe.
class SourceExtents {
 public:
  explicit SourceExtents(const Catalog& catalog) : catalog_(catalog) {}

  // Bytes from the tensor's first one on.
  void add(std::uint32_t source, std::uint64_t begin, std::uint64_t end) {
    const TensorInfo& tensor = catalog_.tensors()[source];
    begin += tensor.offset_begin;
    end += tensor.offset_begin;
    const std::size_t place = place_of(source);
    if (place == extents_.size()) {
      extents_.push_back({.source = source, .begin = begin, .end = end});
      return;
    }
    SourceExtent& extent = extents_[place];
    extent.begin = std::min(extent.begin, begin);
    extent.end = std::max(extent.end, end);
  }

  [[nodiscard]] std::vector<SourceExtent> take() { return std::move(extents_); }

 private:
  // Most targets have one source or two: those are found without an index.
  static constexpr std::size_t unindexed_max = 8;

  // Of the source's extent; their count where it has none yet, and is about to get one.
  [[nodiscard]] std::size_t place_of(std::uint32_t source) {
    if (extents_.size() < unindexed_max) {
      const auto found = std::ranges::find(extents_, source, &SourceExtent::source);
      return static_cast<std::size_t>(found - extents_.begin());
    }
    for (std::size_t i = seen_.size(); i < extents_.size(); ++i) {
      seen_.emplace(extents_[i].source, i);
    }
    const auto known = seen_.find(source);
    return known == seen_.end() ? extents_.size() : known->second;
  }

  const Catalog& catalog_;
  std::vector<SourceExtent> extents_;
  std::unordered_map<std::uint32_t, std::size_t> seen_;
};

}  // namespace

std::vector<SourceExtent> source_extents(const ValueSet& values, const Value& target) {
  SourceExtents extents(values.catalog);
  const auto add = [&](const Box& box, const Value& of) {
    if (is_empty(box)) return;
    const ByteBox bytes = check_box(values, of, box);
    std::uint64_t last = bytes.box.source_offset;
    for (const BoxDim& dim : bytes.box.dims) last += (dim.extent - 1) * dim.source_stride;
    DecodeForm form;
    if (box.decoding == no_decoding) {
      extents.add(box.source, bytes.box.source_offset * bytes.source_bytes,
                  (last + 1) * bytes.source_bytes);
    } else if (!check_decoding(values.tensors(), values.decodings[box.decoding], form)) {
      const auto& sources = values.decodings[box.decoding].sources;
      for (std::size_t i = 0; i < sources.size(); ++i) {
        const auto part = form.part_bytes(i, bytes.box.source_offset, last + 1);
        if (part.size() > 0) extents.add(sources[i], part.begin, part.end);
      }
    }
  };
  if (target.merge == nullptr) {
    for (const Box& box : target.boxes) add(box, target);
  } else {
    Value numbers = {.name = target.name, .shape = target.shape, .dtype = Dtype::f32};
    for (const Box& box : target.boxes) add(box, numbers);
    for_each_operand(*target.merge, [&](const Operand& operand) {
      const Shape shape = operand.elements != 0 ? Shape{operand.elements} : *target.shape;
      numbers.shape = &shape;
      for (const Box& box : operand.boxes) add(box, numbers);
    });
  }
  auto found = extents.take();
  if (!found.empty()) return found;
  // A tensor without elements has sources too, of which no byte is read.
  SourceExtents none(values.catalog);
  for (const std::uint32_t source : sources_of(target.boxes, values.decodings, target.merge)) {
    none.add(source, 0, 0);
  }
  return none.take();
}

}  // namespace loadstone
