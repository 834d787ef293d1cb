#include "plan/costs.h"

#include <algorithm>
#include <vector>

#include "boxes/check_boxes.h"
#include "boxes/direct_read.h"
#include "codec/tensor_table.h"
#include "kernels/quantize.h"
#include "plan/decodings.h"
#include "plan/dtypes.h"

namespace loadstone {

namespace {

// Each has scales that wait for the last one, if they are nested: one a thread, and these are the
// threads that a load has by default.
constexpr unsigned values_at_once = 4;

std::uint64_t sum(std::uint64_t a, std::uint64_t b) {
  return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

std::uint64_t bytes_of(std::uint64_t elements, Dtype dtype) {
  const std::uint64_t width = bits(dtype);
  // Elements of a source fit 64 bits as bytes; this only keeps the product from overflowing.
  return elements / 8 * width + (elements % 8 * width + 7) / 8;
}

bool is_read(const PlannedTarget& target) {
  return target.recipe.origin == Origin::checkpoint &&
         (target.delivery == Delivery::memory || target.delivery == Delivery::disk_write);
}

bool is_quantized(const PlannedTarget& target, QuantizeForm& form) {
  return target.quantization &&
         !prepare_quantization(*target.quantization, target.shape, target.dtype, form);
}

// A stretch of bytes of one source.
struct Stretch {
  std::uint32_t source;
  std::uint64_t begin;
  std::uint64_t end;
};

std::uint64_t union_bytes(std::vector<Stretch>& stretches) {
  std::ranges::sort(stretches, [](const Stretch& a, const Stretch& b) {
    return a.source != b.source ? a.source < b.source : a.begin < b.begin;
  });
  std::uint64_t bytes = 0;
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < stretches.size(); ++i) {
    const Stretch& next = stretches[i];
    if (i == 0 || next.source != stretches[i - 1].source) end = 0;
    if (next.end <= end) continue;
    bytes = sum(bytes, next.end - std::max(next.begin, end));
    end = next.end;
  }
  return bytes;
}

// Whether the file's bytes go straight to their place, without staging.
bool is_direct(const PlannedTarget& target, const Box& box, Dtype source) {
  if (source != target.dtype || target.quantization) return false;
  BoxDims sorted;
  for (const BoxDim& dim : box.dims) static_cast<void>(sorted.append(dim));
  sorted.sort_by_source();
  return reads_directly(sorted.dims(), std::max<std::size_t>(element_bytes(source), 1));
}

// Whether the target has the elements of one whole source in the same order, cast or not.
bool has_whole_source(const Plan& plan, const PlannedTarget& target) noexcept {
  if (target.recipe.origin != Origin::checkpoint || target.recipe.boxes.size() != 1) return false;
  if (target.quantization) return false;
  const Box& box = target.recipe.boxes.front();
  if (box.decoding != no_decoding) return false;
  const TensorInfo& source = plan.catalog->tensors()[box.source];
  if (source.shape.numel() != target.shape.numel()) return false;
  if (target.shape.numel() == 0u) return true;
  // Inside both, each element written once: one dimension without gaps is all of it, in order.
  if (box.source_offset != 0 || box.target_offset != 0 || box.dims.size() > 1) return false;
  return box.dims.empty() || (box.dims[0].source_stride == 1 && box.dims[0].target_stride == 1);
}

// What a box of a decoding reads, appended to `stretches`. Returns the staging that it may need:
// for the result, and for what it is made of, of which scales may be read by several readers.
std::uint64_t decoded_bytes(const Plan& plan, const Box& box, std::vector<Stretch>& stretches,
                            std::uint64_t& least) {
  const Decoding& decoding = plan.decodings[box.decoding];
  DecodeForm form;
  const ElementRange range = source_range(box);
  if (check_decoding(plan.catalog->tensors(), decoding, form) || range.begin == range.end) return 0;
  least = std::max(least, decoding_bytes_least(form));
  std::uint64_t read = 0;
  for (std::size_t i = 0; i < decoding.sources.size(); ++i) {
    const auto part = form.part_bytes(i, range.begin, range.end);
    if (part.size() > 0) stretches.push_back({decoding.sources[i], part.begin, part.end});
    read = sum(read, part.size());
  }
  return sum(bytes_of(range.end - range.begin, decoding.dtype), sum(read, read));
}

}  // namespace

bool is_whole_source(const Plan& plan, const PlannedTarget& target) noexcept {
  if (!has_whole_source(plan, target)) return false;
  const TensorInfo& source = plan.catalog->tensors()[target.recipe.boxes.front().source];
  return source.encoding == Encoding(target.dtype);
}

bool can_keep_on_disk(const Plan& plan, const PlannedTarget& target) noexcept {
  if (!has_whole_source(plan, target)) return false;
  const TensorInfo& source = plan.catalog->tensors()[target.recipe.boxes.front().source];
  const Passage way = passage(source.encoding, target.dtype);
  const bool is_float_cast = way == Passage::cast && kind(target.dtype) == DtypeKind::floating;
  return (way == Passage::same || is_float_cast) && source.shape == target.shape &&
         plan.catalog->shards()[source.shard].format == FileFormat::safetensors;
}

bool can_view(const TensorInfo& tensor) noexcept {
  if (!tensor.encoding.is_dtype()) return false;
  const std::size_t alignment = element_bytes(tensor.encoding.dtype());
  return tensor.byte_count() == 0 || alignment <= 1 || tensor.offset_begin % alignment == 0;
}

bool can_view_file(const Plan& plan, const PlannedTarget& target) noexcept {
  if (!is_whole_source(plan, target)) return false;
  const TensorInfo& source = plan.catalog->tensors()[target.recipe.boxes.front().source];
  return source.byte_count() > 0 && can_view(source);
}

std::uint64_t quantizing_bytes_least(const Plan& plan) {
  std::uint64_t least = 0;
  for (const PlannedTarget& target : plan.targets) {
    QuantizeForm form;
    if (is_read(target) && is_quantized(target, form)) least = std::max(least, form.step_bytes());
  }
  return least == 0 ? 0 : 2 * std::max(least, reader_bytes_least);
}

void count_costs(Plan& plan) {
  std::vector<Stretch> stretches;
  std::uint64_t staged = 0;
  std::uint64_t scratch = 0;
  std::uint64_t least = 0;  // staging that a decoder needs
  plan.bytes_to_write = 0;
  plan.peak_bytes.clear();
  std::uint64_t& cpu = plan.peak_bytes["cpu"];
  const auto& tensors = plan.catalog->tensors();
  for (const PlannedTarget& target : plan.targets) {
    const std::uint64_t bytes = target.byte_count();
    const Origin origin = target.recipe.origin;
    const bool is_the_callers = origin == Origin::constructor || origin == Origin::initialiser;
    if (target.delivery == Delivery::memory || is_the_callers) {
      std::uint64_t& peak = plan.peak_bytes[target.device];
      peak = sum(peak, bytes);
    }
    if (target.delivery == Delivery::disk_write) {
      plan.bytes_to_write = sum(plan.bytes_to_write, bytes);
    }
    if (!is_read(target)) continue;
    if (QuantizeForm form; is_quantized(target, form)) {
      staged = sum(staged, bytes_of(form.elements, form.dtype));
      scratch = std::max(scratch, form.scratch_bytes);
    }
    for (const Box& box : target.recipe.boxes) {
      if (box.decoding != no_decoding) {
        staged = sum(staged, decoded_bytes(plan, box, stretches, least));
        continue;
      }
      const Encoding encoding = tensors[box.source].encoding;
      if (!encoding.is_dtype()) continue;
      const ElementRange range = source_range(box);
      const std::uint64_t width = bits(encoding.dtype());
      stretches.push_back({box.source, range.begin / 8 * width + range.begin % 8 * width / 8,
                           bytes_of(range.end, encoding.dtype())});
      if (!is_direct(target, box, encoding.dtype())) {
        staged = sum(staged, stretches.back().end - stretches.back().begin);
      }
    }
  }
  plan.bytes_to_read = union_bytes(stretches);
  const std::uint64_t staging =
      std::max({plan.staging_bytes_max, quantizing_bytes_least(plan), least});
  cpu = sum(cpu, std::min(staged, staging));
  for (unsigned i = 0; i < values_at_once; ++i) cpu = sum(cpu, scratch);
  if (plan.bytes_to_write > 0) plan.peak_bytes["disk"] = plan.bytes_to_write;
}

}  // namespace loadstone
