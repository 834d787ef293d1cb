#include "boxes/check_boxes.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/checked.h"
#include "base/text.h"
#include "boxes/tiling.h"

namespace loadstone {

namespace {

// Returns the last element that a box touches on one side; nullopt if it does not fit 64 bits.
template <typename Stride>
std::optional<std::uint64_t> last_of(std::uint64_t offset, const Box& box, Stride stride) {
  std::optional<std::uint64_t> last = offset;
  for (const BoxDim& dim : box.dims) {
    if (!last) return last;
    if (dim.extent > 1) last = checked_mul_add(dim.extent - 1, stride(dim), *last);
  }
  return last;
}

std::optional<Problem> outside(const char* side, std::optional<std::uint64_t> last,
                               std::uint64_t elements) {
  if (last && *last < elements) return std::nullopt;
  return Problem{fmt::format("the box exceeds its {}", side),
                 last ? fmt::format("element {}", *last) : "an element beyond 2^64",
                 fmt::format("one of {} elements", elements)};
}

// Returns the number of elements that boxes may address. For a strided tensor these are all
// elements in its byte range.
std::uint64_t elements_of(const TensorInfo& source) noexcept {
  if (source.strides.empty() || !source.encoding.is_dtype()) {
    return source.shape.numel().value_or(0);
  }
  const unsigned element_bytes = bits(source.encoding.dtype()) / 8;  // views use whole-byte dtypes
  return element_bytes == 0 ? 0 : source.byte_count() / element_bytes;
}

// Adds the box's elements to `total`. Returns false if the total exceeds the target's elements.
bool add_volume(const Box& box, std::uint64_t& total, std::uint64_t elements) {
  std::optional<std::uint64_t> sum = 1;
  for (const BoxDim& dim : box.dims) sum = sum ? checked_mul(*sum, dim.extent) : sum;
  if (sum) sum = checked_add(*sum, total);
  total = sum.value_or(UINT64_MAX);
  return total <= elements;
}

Region target_region(const Box& box) {
  Region region;
  region.offset = box.target_offset;
  region.dims.reserve(box.dims.size());
  for (const BoxDim& dim : box.dims) {
    if (dim.extent > 1) region.dims.push_back({dim.extent, dim.target_stride});
  }
  return region;
}

}  // namespace

std::optional<Problem> box_defect(const Box& box, std::uint64_t elements,
                                  const std::vector<TensorInfo>& sources,
                                  std::span<const Decoding> decodings) {
  if (box.source >= sources.size()) {
    return Problem{"the box's source does not exist", fmt::format("source {}", box.source),
                   fmt::format("one of {}", sources.size())};
  }
  const bool is_decoded = box.decoding != no_decoding;
  if (is_decoded && (box.decoding >= decodings.size() || decodings[box.decoding].sources.empty() ||
                     decodings[box.decoding].sources.front() != box.source)) {
    return Problem{"the box's decoding does not exist, or belongs to a different source",
                   fmt::format("decoding {} of source {}", box.decoding, box.source),
                   fmt::format("one of {}", decodings.size())};
  }
  const std::uint64_t source_elements = is_decoded
                                            ? decodings[box.decoding].shape.numel().value_or(0)
                                            : elements_of(sources[box.source]);
  if (box.dims.size() > box_rank_max) {
    return Problem{"the box has too many dimensions", fmt::format("{}", box.dims.size()),
                   fmt::format("at most {}", box_rank_max)};
  }
  for (const BoxDim& dim : box.dims) {
    if (dim.extent > 1 && dim.target_stride == 0) {
      return Problem{"the box writes elements more than once", "target stride 0"};
    }
  }
  if (is_empty(box)) {
    if (elements != 0 || box.source_offset > source_elements || box.target_offset != 0) {
      return Problem{"the box contains no elements"};
    }
    return std::nullopt;
  }
  const auto source_last =
      last_of(box.source_offset, box, [](const BoxDim& dim) { return dim.source_stride; });
  if (auto defect = outside("source", source_last, source_elements)) return defect;
  const auto target_last =
      last_of(box.target_offset, box, [](const BoxDim& dim) { return dim.target_stride; });
  return outside("target", target_last, elements);
}

std::optional<Problem> check_boxes(std::span<const Box> boxes, std::uint64_t elements,
                                   const std::vector<TensorInfo>& sources,
                                   std::span<const Decoding> decodings) {
  if (boxes.empty()) {  // even a target without elements has boxes, which name its sources
    return Problem{"the value has no boxes", "no boxes", "one or more"};
  }
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    auto defect = box_defect(boxes[i], elements, sources, decodings);
    if (!defect && !is_empty(boxes[i]) && !add_volume(boxes[i], total, elements)) {
      defect = Problem{
          "the boxes contain more elements than the target", {}, counted(elements, "element")};
    }
    if (!defect) continue;
    defect->box = i;
    return defect;
  }
  if (total != elements) {
    return Problem{"the boxes do not cover the target", counted(total, "element"),
                   counted(elements, "element")};
  }
  if (elements == 0) return std::nullopt;
  std::vector<Region> regions;
  regions.reserve(boxes.size());
  for (const Box& box : boxes) regions.push_back(target_region(box));
  auto text = tiling_defect(std::move(regions), elements);
  if (!text) return std::nullopt;
  return Problem{std::move(*text), {}, "each element written exactly once"};
}

ElementRange source_range(const Box& box) noexcept {
  std::uint64_t last = box.source_offset;
  for (const BoxDim& dim : box.dims) {
    if (dim.extent == 0) return {box.source_offset, box.source_offset};
    last += (dim.extent - 1) * dim.source_stride;
  }
  return {box.source_offset, last + 1};
}

// Divides by 8 first to avoid an overflow, because 8 elements of any width fill whole bytes.
ByteRange bytes_of(ElementRange range, Dtype dtype) noexcept {
  const std::uint64_t width = bits(dtype);
  return {range.begin / 8 * width + range.begin % 8 * width / 8,
          range.end / 8 * width + (range.end % 8 * width + 7) / 8};
}

std::uint64_t volume(const Box& box) noexcept {
  std::uint64_t count = 1;
  for (const BoxDim& dim : box.dims) count *= dim.extent;
  return count;
}

}  // namespace loadstone
