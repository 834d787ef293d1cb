#include "engine/code_mover.h"

#include <algorithm>
#include <utility>

#include "boxes/block_boxes.h"
#include "boxes/cut.h"
#include "boxes/dims.h"
#include "codec/encode.h"
#include "codec/tensor_table.h"
#include "engine/box_read.h"

namespace loadstone {

namespace {

// Sources are read with the gaps between their runs, unless the gaps are larger than this.
constexpr std::uint64_t span_per_element_max = 4;

std::uint64_t last_element(std::span<const BoxDim> dims, std::uint64_t begin) noexcept {
  for (const BoxDim& dim : dims) begin += (dim.extent - 1) * dim.source_stride;
  return begin;
}

// Returns nullopt if the codes of the box cannot be moved.
std::optional<MovableCodes::Part> part_of(const ValueSet& values, const Value& value,
                                          const BlockGrid& to, const Box& box) {
  if (box.decoding >= values.decodings.size()) return std::nullopt;
  const Decoding& decoding = values.decodings[box.decoding];
  MovableCodes::Part part = {.box = box, .sources = decoding.sources};
  if (decoding.dtype != Dtype::f32 || check_decoding(values.tensors(), decoding, part.form)) {
    return std::nullopt;
  }
  const auto from = part.form.decoder->grid();
  if (!from || !from->gives_codes || !has_same_codes(to, *from) ||
      !blocks_are_within(box, decoding.shape, *from, *value.shape, to)) {
    return std::nullopt;
  }
  part.columns = decoding.shape[decoding.shape.rank() - 1];
  part.divides_scales = from->divides_scales;
  normalise(part.box.dims);
  const auto& dims = part.box.dims;
  const bool is_plain =
      !dims.empty() && dims.back().source_stride == 1 && dims.back().target_stride == 1;
  return is_plain ? std::optional(std::move(part)) : std::nullopt;
}

}  // namespace

std::shared_ptr<const MovableCodes> movable_codes(const ValueSet& values, const Value& value,
                                                  const QuantizedLayout& form) {
  if (value.merge != nullptr || value.boxes.empty() || !holds_moved_codes(form)) return nullptr;
  const auto to = exact_grid(*value.quantization, *value.shape, value.dtype);
  if (!to) return nullptr;
  auto codes = std::make_shared<MovableCodes>();
  codes->per_scale = std::min(to->columns, form.columns);
  const bool has_whole_blocks = form.columns % codes->per_scale == 0;
  // The last block of fp8-block may be short, because its codes are whole bytes.
  if (!has_whole_blocks && form.kind != QuantizeKind::fp8_block) return nullptr;
  std::uint64_t elements = 0;
  for (const Box& box : value.boxes) {
    if (is_empty(box)) continue;
    auto part = part_of(values, value, *to, box);
    if (!part) return nullptr;
    std::uint64_t count = 1;
    for (const BoxDim& dim : part->box.dims) count *= dim.extent;
    elements += count;
    codes->parts.push_back(*std::move(part));
  }
  return elements == form.elements ? codes : nullptr;
}

CodeMover::Result CodeMover::move(const Window& window) {
  result_ = {true, window.end};
  for (const Part& part : window.codes.parts) {
    boxes_.clear();
    cut_box(part.box, window.begin, window.end, boxes_);
    for (const Box& box : boxes_) {
      move_box(window, part, box.dims, box.source_offset, window.begin + box.target_offset);
    }
  }
  return result_;
}

void CodeMover::move_box(const Window& window, const Part& part, std::span<const BoxDim> dims,
                         std::uint64_t source, std::uint64_t target) {
  std::uint64_t elements = 1;
  for (const BoxDim& dim : dims) elements *= dim.extent;
  const ByteRange range = {source, last_element(dims, source) + 1};
  if (dims.size() > 1 && range.size() > span_per_element_max * elements) {
    const BoxDim& outer = dims.front();
    for (std::uint64_t i = 0; i < outer.extent; ++i) {
      move_box(window, part, dims.subspan(1), source + i * outer.source_stride,
               target + i * outer.target_stride);
    }
    return;
  }
  read(part, range, window.room);
  move_runs(window, part, dims, source, target);
}

void CodeMover::move_runs(const Window& window, const Part& part, std::span<const BoxDim> dims,
                          std::uint64_t source, std::uint64_t target) {
  const BoxDim& dim = dims.front();
  if (dims.size() > 1) {
    for (std::uint64_t i = 0; i < dim.extent; ++i) {
      move_runs(window, part, dims.subspan(1), source + i * dim.source_stride,
                target + i * dim.target_stride);
    }
    return;
  }
  const std::uint64_t columns = window.form.columns;
  for (std::uint64_t done = 0; done < dim.extent;) {
    const std::uint64_t at = target + done;
    const std::uint64_t from = source + done;
    const std::uint64_t count =
        std::min({dim.extent - done, moved_values_max, columns - at % columns,
                  part.columns - from % part.columns});
    move_run(window, part, {.begin = at, .count = count}, from);
    done += count;
  }
}

void CodeMover::move_run(const Window& window, const Part& part, MovedRun run,
                         std::uint64_t source) {
  run.per_scale = window.codes.per_scale;
  run.outer = take(part, {source, source + run.count, run.per_scale});
  run.codes = codes_.data();
  run.scales = scales_.data();
  const std::uint64_t matrix = run.begin / window.form.matrix_elements();
  const float scale = window.matrix_scales.empty() ? 1 : window.matrix_scales[matrix];
  result_.is_whole &= write_codes(window.form, window.begin, run, scale, window.parts);
  const std::uint64_t nan = find_nan_code(window.form, run);
  if (nan < run.count) result_.first_bad = std::min(result_.first_bad, run.begin + nan);
}

// Sets codes_ and scales_. Returns the factor of the scales.
float CodeMover::take(const Part& part, const CodeRun& run) {
  const float outer =
      part.form.decoder->take_codes(range_, run, parts_, codes_.data(), scales_.data());
  if (!part.divides_scales) return outer;
  if (outer != last_divisor_) {
    last_divisor_ = outer;
    last_factor_ = same_factor(outer).value_or(0);
  }
  return last_factor_;
}

void CodeMover::read(const Part& part, ByteRange elements, std::span<std::byte> room) {
  const auto bytes_of = [&](std::size_t i) {
    return part.form.part_bytes(i, elements.begin, elements.end);
  };
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < part.sources.size(); ++i) bytes += bytes_of(i).size();
  std::byte* to = room.data();
  if (bytes > room.size()) {
    spare_.resize(bytes);
    to = spare_.data();
  }
  range_ = elements;
  for (std::size_t i = 0; i < part.sources.size(); ++i) {
    const ByteRange needed = bytes_of(i);
    if (needed.size() > 0) read_source(values_, shards_, part.sources[i], needed, to);
    parts_[i] = to;
    to += needed.size();
  }
  bytes_read_ += bytes;
}

std::vector<float> CodeMover::matrix_scales(const MovableCodes& codes,
                                            const QuantizedLayout& form) {
  std::vector<float> scales(form.stack, 0.0F);
  for (std::uint64_t i = 0; i < form.stack; ++i) {
    if (!join_matrix_scale(codes, form, i, scales[i])) return {};
  }
  return scales;
}

// Sets the scale if it is 0. Returns false if blocks of the matrix have a different scale.
bool CodeMover::join_matrix_scale(const MovableCodes& codes, const QuantizedLayout& form,
                                  std::uint64_t matrix, float& scale) {
  const bool is_fp8 = form.kind == QuantizeKind::fp8;
  const std::uint64_t begin = matrix * form.matrix_elements();
  for (const Part& part : codes.parts) {
    boxes_.clear();
    cut_box(part.box, begin, begin + form.matrix_elements(), boxes_);
    for (const Box& box : boxes_) {
      const std::uint64_t first = box.source_offset;
      const std::size_t scale_part = part.sources.size() - 1;
      const auto bytes_to = [&](std::uint64_t end) {
        return part.form.part_bytes(scale_part, first, end).size();
      };
      if (bytes_to(last_element(box.dims, first) + 1) != bytes_to(first + 1)) return false;
      const ByteRange block = {first, first + std::min(codes.per_scale, std::uint64_t{32})};
      read(part, block, {});
      const float outer = take(part, {block.begin, block.end, codes.per_scale});
      const float found = is_fp8 ? scales_[0] : outer;
      if (!(found > 0) || (scale != 0 && scale != found)) return false;
      scale = found;
    }
  }
  return true;
}

}  // namespace loadstone
