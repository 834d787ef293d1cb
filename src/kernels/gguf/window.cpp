#include "kernels/gguf/window.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <span>

#include "kernels/cast.h"
#include "kernels/gguf.h"
#include "kernels/gguf/exact_blocks.h"
#include "kernels/modelopt.h"

namespace loadstone {

namespace {

// Number of values that are converted to F32 at a time: whole blocks of every format, and few
// enough to fit into the L1 cache.
constexpr std::uint64_t piece_elements = 2048;
using Piece = std::array<float, piece_elements>;

void replace_non_finite(std::span<float> block) noexcept {
  float most = 0;
  for (const float value : block) {
    if (std::isfinite(value)) most = std::max(most, std::abs(value));
  }
  for (float& value : block) {
    if (std::isnan(value)) value = 0;
    if (std::isinf(value)) value = std::copysign(most, value);
  }
}

// Reads the values of a window in pieces.
class Pieces {
 public:
  Pieces(const QuantizedLayout& form, std::uint64_t begin, const std::byte* numbers)
      : form_(form),
        block_(layout(form.block)),
        widen_(cast_between(form.dtype, Dtype::f32).run),
        begin_(begin),
        numbers_(numbers) {}

  // Loads values from index `at` on as F32 and replaces non-finite ones. Returns the index of the
  // first non-finite value, or at + count.
  std::uint64_t load(std::uint64_t at, std::uint64_t count) noexcept {
    const std::byte* const from = numbers_ + (at - begin_) * element_bytes(form_.dtype);
    float most = 0;
    const std::uint64_t good = join_amax(form_.dtype, from, count, most);
    widen_(from, reinterpret_cast<std::byte*>(piece_.data()), count);
    for (std::uint64_t i = 0; good < count && i < count; i += block_.elements) {
      replace_non_finite({piece_.data() + i, block_.elements});
    }
    return at + good;
  }

  // Returns the mean square of the row that begins at index `at`. Squares are summed in order.
  float mean_square(std::uint64_t at) noexcept {
    float sum = 0;
    for (std::uint64_t done = 0; done < form_.columns;) {
      const std::uint64_t count = std::min(piece_elements, form_.columns - done);
      (void)load(at + done, count);
      for (std::uint64_t i = 0; i < count; ++i) sum += piece_[i] * piece_[i];
      done += count;
    }
    return sum / static_cast<float>(form_.columns);
  }

  [[nodiscard]] const float* data() const noexcept { return piece_.data(); }

 private:
  const QuantizedLayout& form_;
  const BlockLayout block_;
  const CastRun widen_;
  const std::uint64_t begin_;
  const std::byte* const numbers_;
  alignas(64) Piece piece_;
};

// Returns a pointer to the importance of value `at`. The rest of the row's importance follows.
const float* importance_at(const QuantizedLayout& form, std::uint64_t at) noexcept {
  const bool is_one = form.importance->size() == form.columns;
  const std::uint64_t matrix = is_one ? 0 : at / form.matrix_elements();
  return form.importance->data() + matrix * form.columns + at % form.columns;
}

}  // namespace

std::uint64_t encode_gguf_window(const QuantizedLayout& form, std::uint64_t begin,
                                 std::uint64_t end, const std::byte* numbers,
                                 std::byte* blocks) noexcept {
  const BlockLayout block = layout(form.block);
  const EncodeBlocks encode = gguf_encoder(form.block);
  const bool is_weighted = form.importance != nullptr;
  std::uint64_t first_wrong = end;
  Pieces pieces(form, begin, numbers);
  BlockImportance importance;
  for (std::uint64_t at = begin; at < end;) {
    std::uint64_t count = std::min(piece_elements, end - at);
    if (is_weighted) {
      const std::uint64_t column = at % form.columns;
      count = std::min(count, form.columns - column);
      importance.numbers = importance_at(form, at);
      if (column == 0 && asks_for_row(form.block)) importance.mean_square = pieces.mean_square(at);
    }
    const std::uint64_t wrong = pieces.load(at, count);
    if (wrong < at + count) first_wrong = std::min(first_wrong, wrong);
    encode(pieces.data(), count / block.elements, is_weighted ? &importance : nullptr, blocks);
    for (std::uint64_t i = 0; form.exact_first && i < count; i += block.elements) {
      encode_exactly(form.block, pieces.data() + i, blocks + i / block.elements * block.bytes);
    }
    blocks += count / block.elements * block.bytes;
    at += count;
  }
  return first_wrong;
}

void decode_gguf_window(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                        const std::byte* blocks, Dtype target, std::byte* numbers) noexcept {
  const DecodeBlocks decode = gguf_decoder(form.block, target, GgufMode::exact);
  decode(blocks, (end - begin) / layout(form.block).elements, numbers);
}

}  // namespace loadstone
