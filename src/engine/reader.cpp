#include "engine/reader.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "boxes/copy_box.h"
#include "codec/tensor_table.h"
#include "engine/box_read.h"
#include "engine/pages.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

// Maximum buffers in one read, below the limit of preadv.
constexpr std::size_t parts_max = 256;
// Maximum bytes of holes in one read.
constexpr std::size_t holes_bytes_max = 64 * skipped_bytes_max;

// Returns true if the value is non-finite although its code is finite, which means that the scale
// is wrong. Codes that are not floats are always finite.
bool is_spoiled(const TensorInfo& data, float value, const std::byte* codes, std::size_t number) {
  if (std::isfinite(value)) return false;
  if (!data.encoding.is_dtype()) return true;
  const Dtype dtype = data.encoding.dtype();
  return kind(dtype) != DtypeKind::floating ||
         finite_numbers(dtype, codes + number * element_bytes(dtype), 1) == 1;
}

// Counts how often a piece delivers the element at this offset. Strides are nested, widest first.
std::uint64_t deliveries(std::span<const BoxDim> dims, std::uint64_t offset) {
  std::uint64_t times = 1;
  std::uint64_t below = UINT64_MAX;
  for (std::size_t i = 0; i < dims.size(); ++i) {
    std::uint64_t stride = 0;
    for (const BoxDim& dim : dims) {
      if (dim.source_stride < below) stride = std::max(stride, dim.source_stride);
    }
    if (stride == 0) break;
    std::uint64_t extent = 1;
    for (const BoxDim& dim : dims) {
      if (dim.source_stride == stride) extent += dim.extent - 1;
    }
    offset -= std::min(offset / stride, extent - 1) * stride;
    below = stride;
  }
  for (const BoxDim& dim : dims) {
    if (dim.source_stride == 0) times *= dim.extent;
  }
  return offset == 0 ? times : 0;
}

}  // namespace

void Reader::run(Job& job) {
  std::ranges::stable_sort(job.pieces, {}, &Piece::file_begin);
  if (job.decoding != no_decoding) {
    decode_pieces(job);
  } else {
    mark_overlaps(job);
    read_pieces(job);
  }
  if (context_.stop.load(std::memory_order_relaxed)) return;
  for (const Piece& piece : job.pieces) deliver(job, piece);
}

// Bytes that several pieces need are read only once, so none of these pieces can be read directly
// into its destination.
void Reader::mark_overlaps(Job& job) {
  Piece* farthest = nullptr;
  for (Piece& piece : job.pieces) {
    if (farthest != nullptr && piece.file_begin < farthest->file_end) {
      piece.direct = farthest->direct = false;
    }
    if (farthest == nullptr || piece.file_end > farthest->file_end) farthest = &piece;
  }
}

void Reader::read_pieces(const Job& job) {
  parts_.clear();
  read_begin_ = read_end_ = job.begin;
  for (const Piece& piece : job.pieces) {
    if (context_.stop.load(std::memory_order_relaxed)) return;
    if (piece.direct) {
      read_direct(job, piece);
    } else {
      read_staged(job, piece);
    }
  }
  flush(job);
}

void Reader::read_direct(const Job& job, const Piece& piece) {
  skip_to(job, piece.file_begin);
  append(job, place(piece), piece.file_end - piece.file_begin);
  ends_staged_ = false;
}

// Returns the range of the slot, which the caller is about to write.
std::byte* Reader::staged(std::uint64_t begin, std::uint64_t end) {
  if (!slot_) slot_.emplace(context_.memory, context_.slot_bytes);
  if (end > slot_->size()) throw Error("internal", "a window is larger than its staging slot");
  slot_->use(begin, end);
  return slot_->data() + begin;
}

// Each byte of the window has a fixed position in the slot. Bytes that overlap an earlier piece are
// already in the slot.
void Reader::read_staged(const Job& job, const Piece& piece) {
  std::uint64_t begin = std::max(piece.file_begin, read_end_);
  if (begin >= piece.file_end) return;
  const bool goes_on = ends_staged_ && !parts_.empty();
  if (goes_on && begin - read_end_ <= staged_hole_bytes_max) {
    begin = read_end_;
  } else {
    skip_to(job, begin);
  }
  append(job, staged(begin - job.begin, piece.file_end - job.begin), piece.file_end - begin);
  ends_staged_ = true;
}

// Each byte of the window has a fixed position in the slot, as in read_staged().
void Reader::decode_pieces(const Job& job) {
  std::uint64_t done = job.begin;
  for (const Piece& piece : job.pieces) {
    const std::uint64_t begin = std::max(piece.file_begin, done);
    if (begin >= piece.file_end) continue;
    decode_range(job, begin, piece.file_end);
    done = piece.file_end;
  }
}

// Decodes the range, as many elements at a time as fit into the memory.
void Reader::decode_range(const Job& job, std::uint64_t begin, std::uint64_t end) {
  const Decoding& decoding = context_.values.decodings[job.decoding];
  const PreparedDecoder& form = context_.forms[job.decoding];
  const std::uint64_t size = element_bytes(form.dtype);
  const std::uint64_t room_bytes = parts_bytes_max(form, context_.slot_bytes);
  if (!parts_of_numbers_ || parts_of_numbers_->size() < room_bytes) {
    parts_of_numbers_.emplace(context_.memory, room_bytes);
  }
  std::byte* const window = staged(begin - job.begin, end - job.begin) - (begin - job.begin);
  populate_fresh(window + (begin - job.begin), end - begin);
  for (std::uint64_t at = begin / size; at < end / size;) {
    if (context_.stop.load(std::memory_order_relaxed)) return;
    std::uint64_t count = end / size - at;
    const auto needed = [&] {
      std::uint64_t bytes = 0;
      for (std::size_t i = 0; i < decoding.sources.size(); ++i) {
        bytes += form.part_bytes(i, at, at + count).size();
      }
      return bytes;
    };
    while (count > 1 && needed() > room_bytes) count /= 2;
    if (needed() > room_bytes)
      throw Error("internal", "the memory limit is too small to decode one value");
    parts_of_numbers_->use(0, needed());
    std::array<const std::byte*, Decoder::parts_max> parts = {};
    std::byte* to = parts_of_numbers_->data();
    for (std::size_t i = 0; i < decoding.sources.size(); ++i) {
      const auto bytes = form.part_bytes(i, at, at + count);
      if (bytes.size() > 0) read_part(decoding.sources[i], bytes, to);
      parts[i] = to;
      to += bytes.size();
    }
    std::byte* const numbers = window + (at * size - job.begin);
    decode(form, at, at + count, parts, numbers);
    count_overflow(job, {at, at + count}, parts, numbers);
    at += count;
  }
}

// Counts overflows. Decoders compute in F32 and round the result. If some values are non-finite
// afterwards, they are decoded again as F32, a few at a time. This distinguishes overflows from
// values that a scale spoiled, and from values that were already non-finite.
void Reader::count_overflow(const Job& job, PreparedDecoder::Range range,
                            std::span<const std::byte* const> parts, const std::byte* numbers) {
  const Decoding& decoding = context_.values.decodings[job.decoding];
  const PreparedDecoder& form = context_.forms[job.decoding];
  if (finite_numbers(form.dtype, numbers, range.size()) == range.size()) return;
  Decoding exact = decoding;
  exact.dtype = Dtype::f32;
  PreparedDecoder wide;
  if (check_decoding(context_.values.tensors(), exact, wide)) return;
  std::array<float, 1024> values{};
  for (std::uint64_t at = range.begin; at < range.end;) {
    const std::uint64_t end = std::min(range.end, at + values.size());
    std::array<const std::byte*, Decoder::parts_max> some = {};
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (parts[i] == nullptr) continue;
      some[i] = parts[i] + (form.part_bytes(i, at, end).begin -
                            form.part_bytes(i, range.begin, range.end).begin);
    }
    std::byte* const to = std::as_writable_bytes(std::span(values)).data();
    decode(wide, at, end, some, to);
    count_delivered(job, {at, end}, values, some.front());
    at = end;
  }
}

// Counts only delivered values, because the range may also contain values between those of a slice,
// or values for another target.
void Reader::count_delivered(const Job& job, PreparedDecoder::Range range,
                             std::span<const float> values, const std::byte* codes) {
  const std::uint32_t source = context_.values.decodings[job.decoding].sources.front();
  const TensorInfo& data = context_.values.tensors()[source];
  const Dtype dtype = context_.forms[job.decoding].dtype;
  const std::uint64_t size = element_bytes(dtype);
  const CountOverflow count_of = cast_between(Dtype::f32, dtype).overflow;
  for (const Piece& piece : job.pieces) {
    const std::uint64_t first = piece.file_begin / size;
    if (first >= range.end) break;
    const std::span dims = std::span(job.dims).subspan(piece.dims_begin, piece.dims_count);
    const std::uint64_t end = std::min(range.end, piece.file_end / size);
    Overflow overflow;
    for (std::uint64_t at = std::max(range.begin, first); at < end; ++at) {
      const std::size_t number = at - range.begin;
      Overflow one;
      if (count_of != nullptr) one = count_of(std::as_bytes(values.subspan(number)).data(), 1, 1);
      if (is_spoiled(data, values[number], codes, number)) one.spoiled = 1;
      if (one.count + one.spoiled == 0) continue;
      const std::uint64_t times = deliveries(dims, at - first);
      one.count *= times;
      one.spoiled *= times;
      if (times != 0) overflow += one;
    }
    context_.overflows.add(piece.value, overflow);
  }
}

void Reader::read_part(std::uint32_t source, PreparedDecoder::Range bytes, std::byte* to) {
  populate_fresh(to, bytes.size());
  read_source(context_.values, context_.shards, source, bytes, to);
  context_.bytes_read.fetch_add(bytes.size(), std::memory_order_relaxed);
}

void Reader::skip_to(const Job& job, std::uint64_t offset) {
  const std::uint64_t hole = offset - read_end_;
  if (!parts_.empty() && hole <= skipped_bytes_max) {
    if (skipped_ == nullptr)
      skipped_ = std::make_unique_for_overwrite<std::byte[]>(holes_bytes_max);
    if (skipped_end_ + hole > holes_bytes_max) flush(job);
    const std::size_t end = skipped_end_ + hole;
    append(job, skipped_.get() + skipped_end_, hole);
    skipped_end_ = end;  // set even if the hole began a new read
    return;
  }
  flush(job);
  read_begin_ = read_end_ = offset;
}

void Reader::append(const Job& job, std::byte* to, std::uint64_t bytes) {
  while (bytes > 0) {
    if (read_end_ - read_begin_ == context_.chunk_bytes || parts_.size() == parts_max) flush(job);
    const std::uint64_t room = context_.chunk_bytes - (read_end_ - read_begin_);
    const std::uint64_t count = std::min(room, bytes);
    if (!parts_.empty() && parts_.back().data() + parts_.back().size() == to) {
      parts_.back() = {parts_.back().data(), parts_.back().size() + count};
    } else {
      parts_.emplace_back(to, count);
    }
    read_end_ += count;
    to += count;
    bytes -= count;
  }
}

void Reader::flush(const Job& job) {
  if (!parts_.empty() && !context_.stop.load(std::memory_order_relaxed)) {
    populate_parts();
    try {
      context_.shards[job.shard]->read(read_begin_, parts_);
    } catch (const Error& error) {
      rethrow_named(error, context_.values.catalog.shards()[job.shard], read_begin_,
                    tensor_at(job, error.where().byte_offset.value_or(read_begin_)));
    }
    context_.bytes_read.fetch_add(read_end_ - read_begin_, std::memory_order_relaxed);
  }
  parts_.clear();
  skipped_end_ = 0;
  read_begin_ = read_end_;
}

// Populates neighbouring parts together, because small tensors are adjacent in a heap and one call
// for each would cost too much. The heap's bytes between them do not change.
void Reader::populate_parts() const noexcept {
  constexpr std::uintptr_t gap_max = 4096;
  std::span<std::byte> run;
  for (const std::span<std::byte> part : parts_) {
    const auto end = reinterpret_cast<std::uintptr_t>(run.data() + run.size());
    const auto begin = reinterpret_cast<std::uintptr_t>(part.data());
    if (run.empty() || begin < end || begin - end >= gap_max) {
      populate_fresh(run.data(), run.size());
      run = part;
    } else {
      run = {run.data(), run.size() + (begin - end) + part.size()};
    }
  }
  populate_fresh(run.data(), run.size());
}

// Returns an empty name if no piece contains the offset.
std::string_view Reader::tensor_at(const Job& job, std::uint64_t offset) const {
  for (const std::uint64_t at : {offset, read_begin_}) {
    for (const Piece& piece : job.pieces) {
      if (piece.file_begin <= at && at < piece.file_end) {
        return context_.values.tensors()[piece.source].name;
      }
    }
  }
  return {};
}

std::byte* Reader::place(const Piece& piece) const {
  std::byte* const first = context_.sink != nullptr ? context_.sink->place(piece.value, 0)
                                                    : context_.places[piece.value];
  return first + piece.target_begin;
}

// Copies the staged bytes of a piece, and counts them.
void Reader::deliver(const Job& job, const Piece& piece) {
  const Dtype to = context_.values[piece.value].dtype;
  const Dtype from = job.decoding != no_decoding
                         ? context_.values.decodings[job.decoding].dtype
                         : context_.values.tensors()[piece.source].encoding.dtype();
  // Elements of less than a byte are copied as bytes: see check_box().
  const bool whole_bytes = element_bytes(from) != 0;
  const std::size_t source_bytes = whole_bytes ? element_bytes(from) : 1;
  const std::size_t target_bytes = whole_bytes ? element_bytes(to) : 1;
  const std::span dims = std::span(job.dims).subspan(piece.dims_begin, piece.dims_count);
  std::uint64_t span = 1;
  for (const BoxDim& dim : dims) span += (dim.extent - 1) * dim.target_stride;
  std::byte* const target = place(piece);
  if (!piece.direct) {
    // Scattered pieces are not populated, because other threads write between their elements.
    if (span < 2 * piece.elements) populate_fresh(target, span * target_bytes);
    const Cast cast = whole_bytes ? cast_between(from, to) : cast_between(Dtype::u8, Dtype::u8);
    const std::byte* const source = slot_->data() + (piece.file_begin - job.begin);
    context_.overflows.add(piece.value,
                           copy_box(dims, cast, source, source_bytes, target, target_bytes));
  }
  const std::uint64_t bytes = piece.elements * target_bytes;
  context_.bytes_done.fetch_add(piece.elements * source_bytes, std::memory_order_relaxed);
  context_.written[piece.value].fetch_add(bytes, std::memory_order_relaxed);
  // A piece with gaps is not reported, because its bytes are not contiguous.
  if (context_.sink != nullptr && span == piece.elements) {
    context_.sink->made(piece.value, 0, {target, bytes});
  }
}

void Reader::populate_fresh(std::byte* data, std::uint64_t bytes) const noexcept {
  if (context_.populates) populate(data, bytes);
}

}  // namespace loadstone
