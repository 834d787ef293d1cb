#include "plan/check_boxes.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/checked.h"
#include "plan/tiling.h"

namespace loadstone {

namespace {

// The last position that a box touches on one side; nothing when it does not fit 64 bits.
template <typename Stride>
std::optional<std::uint64_t> last_of(std::uint64_t offset, const Box& box, Stride stride) {
  std::optional<std::uint64_t> last = offset;
  for (const BoxDim& dim : box.dims) {
    if (!last) return last;
    if (dim.extent > 1) last = checked_mul_add(dim.extent - 1, stride(dim), *last);
  }
  return last;
}

std::optional<BoxDefect> outside(const char* side, std::optional<std::uint64_t> last,
                                 std::uint64_t elements) {
  if (last && *last < elements) return std::nullopt;
  return BoxDefect{fmt::format("the box leaves its {}", side),
                   last ? fmt::format("element {}", *last) : "an element beyond 2^64",
                   fmt::format("one of {} elements", elements), std::nullopt};
}

// Those that boxes may reach: of a strided tensor, what its range holds.
std::uint64_t elements_of(const TensorInfo& source) noexcept {
  if (source.strides.empty() || !source.encoding.is_dtype()) {
    return source.shape.numel().value_or(0);
  }
  const unsigned element_bytes = bits(source.encoding.dtype()) / 8;  // no view cuts bytes
  return element_bytes == 0 ? 0 : source.byte_count() / element_bytes;
}

// Checks one box by itself and adds its volume to `total`.
std::optional<BoxDefect> check_box(const Box& box, std::uint64_t elements,
                                   const std::vector<TensorInfo>& sources,
                                   std::span<const Decoding> decodings, std::uint64_t& total) {
  if (box.source >= sources.size()) {
    return BoxDefect{"the box's source does not exist", fmt::format("source {}", box.source),
                     fmt::format("one of {}", sources.size()), std::nullopt};
  }
  const bool is_decoded = box.decoding != no_decoding;
  if (is_decoded && (box.decoding >= decodings.size() || decodings[box.decoding].sources.empty() ||
                     decodings[box.decoding].sources.front() != box.source)) {
    return BoxDefect{"the box's decoding does not exist, or is another source's",
                     fmt::format("decoding {} of source {}", box.decoding, box.source),
                     fmt::format("one of {}", decodings.size()), std::nullopt};
  }
  const std::uint64_t source_elements = is_decoded
                                            ? decodings[box.decoding].shape.numel().value_or(0)
                                            : elements_of(sources[box.source]);
  if (box.dims.size() > box_dims_max) {
    return BoxDefect{"the box has too many dimensions", fmt::format("{}", box.dims.size()),
                     fmt::format("at most {}", box_dims_max), std::nullopt};
  }
  std::optional<std::uint64_t> count = 1;
  bool is_empty = false;
  for (const BoxDim& dim : box.dims) {
    is_empty = is_empty || dim.extent == 0;
    if (count) count = checked_mul(*count, std::max<std::uint64_t>(dim.extent, 1));
    if (dim.extent > 1 && dim.target_stride == 0) {
      return BoxDefect{
          "the box writes elements more than once", "target stride 0", {}, std::nullopt};
    }
  }
  if (is_empty) {
    if (elements != 0 || box.source_offset > source_elements || box.target_offset != 0) {
      return BoxDefect{"the box holds no elements", {}, {}, std::nullopt};
    }
    return std::nullopt;
  }
  const auto source_last =
      last_of(box.source_offset, box, [](const BoxDim& dim) { return dim.source_stride; });
  if (auto defect = outside("source", source_last, source_elements)) return defect;
  const auto target_last =
      last_of(box.target_offset, box, [](const BoxDim& dim) { return dim.target_stride; });
  if (auto defect = outside("target", target_last, elements)) return defect;
  const auto sum = count ? checked_add(total, *count) : std::nullopt;
  if (!sum || *sum > elements) {
    return BoxDefect{"the boxes hold more elements than the target",
                     {},
                     fmt::format("{} elements", elements),
                     std::nullopt};
  }
  total = *sum;
  return std::nullopt;
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

std::optional<BoxDefect> check_boxes(std::span<const Box> boxes, std::uint64_t elements,
                                     const std::vector<TensorInfo>& sources,
                                     std::span<const Decoding> decodings) {
  if (boxes.empty()) {  // without elements a target has boxes all the same, for its provenance
    return BoxDefect{"no box says where the value comes from", "no boxes", "one or more",
                     std::nullopt};
  }
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    auto defect = check_box(boxes[i], elements, sources, decodings, total);
    if (!defect) continue;
    defect->box = i;
    return defect;
  }
  if (total != elements) {
    return BoxDefect{"the boxes do not cover the target", fmt::format("{} elements", total),
                     fmt::format("{} elements", elements), std::nullopt};
  }
  if (elements == 0) return std::nullopt;
  std::vector<Region> regions;
  regions.reserve(boxes.size());
  for (const Box& box : boxes) regions.push_back(target_region(box));
  auto text = tiling_defect(std::move(regions), elements);
  if (!text) return std::nullopt;
  return BoxDefect{std::move(*text), {}, "each element written exactly once", std::nullopt};
}

bool moves_whole_bytes(const Box& box, unsigned bits) noexcept {
  if (bits % 8 == 0) return true;
  std::uint64_t run = 1;
  for (std::size_t i = box.dims.size(); i-- > 0;) {
    const BoxDim& dim = box.dims[i];
    if (dim.extent == 0) return true;
    if (dim.extent == 1) continue;
    if (dim.source_stride != run || dim.target_stride != run) return false;
    run *= dim.extent;
  }
  // 8 elements fill whole bytes whatever their width, so no product is needed.
  const auto fills = [&](std::uint64_t count) { return (count % 8) * bits % 8 == 0; };
  return fills(run) && fills(box.source_offset) && fills(box.target_offset);
}

ElementRange source_range(const Box& box) noexcept {
  std::uint64_t last = box.source_offset;
  for (const BoxDim& dim : box.dims) {
    if (dim.extent == 0) return {box.source_offset, box.source_offset};
    last += (dim.extent - 1) * dim.source_stride;
  }
  return {box.source_offset, last + 1};
}

std::uint64_t volume(const Box& box) noexcept {
  std::uint64_t count = 1;
  for (const BoxDim& dim : box.dims) count *= dim.extent;
  return count;
}

}  // namespace loadstone
