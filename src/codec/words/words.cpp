#include "codec/words/words.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "kernels/cast.h"
#include "kernels/number.h"

namespace loadstone::words {

namespace {

// Number of F32 values that fit the L1 cache.
constexpr std::uint64_t run_max = 1024;
constexpr std::uint64_t word_bytes = 4;
constexpr unsigned word_bits = 32;

std::uint32_t word_at(const std::byte* words, std::uint64_t index) noexcept {
  std::uint32_t word = 0;
  std::memcpy(&word, words + index * word_bytes, sizeof(word));
  return word;
}

// Returns the bit position of a column's code within its word, which contains eight columns.
unsigned interleaved_shift(std::uint64_t column) noexcept {
  constexpr std::array<unsigned, 8> places = {0, 4, 1, 5, 2, 6, 3, 7};
  return 4 * places[column % 8];
}

float scale_at(Dtype dtype, const std::byte* from, std::uint64_t index) noexcept {
  if (dtype == Dtype::f16) return number::load<Dtype::f16>(from + 2 * index);
  if (dtype == Dtype::bf16) return number::load<Dtype::bf16>(from + 2 * index);
  return number::load<Dtype::f32>(from + 4 * index);
}

// Returns the range of words that contain the fields [begin, end) of a stream.
ByteRange words_of(std::uint64_t begin, std::uint64_t end, unsigned bits) noexcept {
  return {begin * bits / word_bits, (end * bits + word_bits - 1) / word_bits};
}

class WordDecoder : public Decoder {
 public:
  explicit WordDecoder(const Packing& form) : form_(form) {}

  [[nodiscard]] ByteRange part_bytes(std::size_t part, std::uint64_t begin,
                                     std::uint64_t end) const noexcept final {
    return part_of_rows(part, begin / form_.columns, (end - 1) / form_.columns + 1);
  }

  [[nodiscard]] std::optional<BlockGrid> grid() const final {
    if (form_.has_order) return std::nullopt;
    const bool is_across = form_.layout == Layout::across;
    const std::uint64_t group = form_.has_one_scale ? UINT64_MAX : form_.group_size;
    const int most = (1 << form_.bits) - 1;
    const int half = (most + 1) / 2;
    const auto symmetric = integer_codes(-half, half - 1);
    return BlockGrid{.codes = form_.has_zeros ? integer_codes(-most, most) : symmetric,
                     .symmetric_codes = form_.has_zeros ? symmetric : std::span<const float>(),
                     .scale = form_.scale,
                     .has_signed_scales = true,
                     .rows = is_across && !form_.has_one_scale ? 1 : group,
                     .columns = is_across ? group : 1,
                     .gives_codes = is_across};
  }

 protected:
  [[nodiscard]] virtual ByteRange part_of_rows(std::size_t part, std::uint64_t first,
                                               std::uint64_t last) const noexcept = 0;
  // Rounds and writes values of one row: scale * (code - zero point).
  void write(const float* values, std::uint64_t count, std::byte* target) const noexcept {
    round_.run(reinterpret_cast<const std::byte*>(values), target, count);
  }
  [[nodiscard]] std::size_t order_part() const noexcept { return form_.has_zeros ? 3 : 2; }
  [[nodiscard]] std::uint64_t group_of(const std::byte* order, std::uint64_t first,
                                       std::uint64_t index) const noexcept {
    if (!form_.has_order) return index / form_.group_size;
    // The plan has checked the order. If the file changes afterwards, the load detects it only at
    // its end, so this limit prevents reads beyond the scales until then.
    return std::min<std::uint64_t>(word_at(order, index - first), form_.groups - 1);
  }
  [[nodiscard]] unsigned zero_of(unsigned stored) const noexcept {
    return (stored + form_.zero_offset) & ((1u << form_.bits) - 1);
  }

  const Packing form_;
  const Cast round_ = cast_between(Dtype::f32, form_.dtype);
};

// Computes values[i] = scales[i] * (values[i] - zeros[i]). The values and zero points are finite.
void scale(float* values, const float* zeros, const float* scales, std::uint64_t count) noexcept {
  bool has_infinity = false;
  for (std::uint64_t i = 0; i < count; ++i) {
    values[i] -= zeros[i];
    has_infinity |= std::isinf(scales[i]);
  }
  if (has_infinity) {
    for (std::uint64_t i = 0; i < count; ++i) values[i] = number::product(scales[i], values[i]);
    return;
  }
  for (std::uint64_t i = 0; i < count; ++i) values[i] = scales[i] * values[i];
}

// ---- GPTQ and AWQ: groups of rows, with one scale per column of a group

class GroupedRows final : public WordDecoder {
 public:
  using WordDecoder::WordDecoder;

  [[nodiscard]] ByteRange part_of_rows(std::size_t part, std::uint64_t first,
                                       std::uint64_t last) const noexcept override {
    const auto of_rows = [](ByteRange rows, std::uint64_t bytes) {
      return ByteRange{rows.begin * bytes, rows.end * bytes};
    };
    if (part == 0) {
      const bool is_down = form_.layout == Layout::down;
      return of_rows(is_down ? words_of(first, last, form_.bits) : ByteRange{first, last},
                     (is_down ? form_.columns : form_.columns / 8) * word_bytes);
    }
    if (part < order_part()) {
      const std::uint64_t row =
          part == 1 ? form_.columns * element_bytes(form_.scale) : zero_words() * word_bytes;
      return of_rows(groups_of(first, last), row);
    }
    if (part > order_part() || !form_.has_order) return {};
    return of_rows({first, last}, word_bytes);
  }

  // A code may be split over two words.
  [[nodiscard]] std::uint64_t bytes_of_one() const noexcept override {
    const bool straddles = word_bits % form_.bits != 0;
    return Decoder::bytes_of_one() + (straddles ? form_.columns * word_bytes : 0);
  }

  void decode(std::uint64_t begin, std::uint64_t end, std::span<const std::byte* const> parts,
              std::byte* target) const noexcept override {
    const std::uint64_t columns = form_.columns;
    const std::uint64_t first = begin / columns;
    const std::uint64_t last = (end - 1) / columns + 1;
    const std::uint64_t first_group = groups_of(first, last).begin;
    const std::byte* const order = form_.has_order ? parts[order_part()] : nullptr;
    const std::size_t size = element_bytes(form_.dtype);
    alignas(64) std::array<float, run_max> zeros;
    alignas(64) std::array<float, run_max> scales;
    alignas(64) std::array<float, run_max> values;
    // Processes runs of columns through all rows, so that each group's scales are unpacked only
    // once.
    for (std::uint64_t run = 0; run < columns; run += run_max) {
      const std::uint64_t run_end = std::min(run + run_max, columns);
      std::uint64_t known_group = UINT64_MAX;
      for (std::uint64_t row = first; row < last; ++row) {
        const std::uint64_t from = std::max(run, row == first ? begin % columns : 0);
        const std::uint64_t to =
            std::min(run_end, row + 1 == last ? (end - 1) % columns + 1 : columns);
        if (from >= to) continue;
        const std::uint64_t group = group_of(order, first, row);
        if (group != known_group) {
          load_group(group - first_group, run, run_end, parts, zeros.data(), scales.data());
          known_group = group;
        }
        load_codes(row, first, from, to, parts[0], values.data());
        scale(values.data(), zeros.data() + (from - run), scales.data() + (from - run), to - from);
        write(values.data(), to - from, target + (row * columns + from - begin) * size);
      }
    }
  }

 private:
  [[nodiscard]] std::uint64_t zero_words() const noexcept {
    return (form_.columns * form_.bits + word_bits - 1) / word_bits;
  }
  // If there is an order, rows may belong to any group.
  [[nodiscard]] ByteRange groups_of(std::uint64_t first, std::uint64_t last) const noexcept {
    if (form_.has_order) return {0, form_.groups};
    return {first / form_.group_size, (last - 1) / form_.group_size + 1};
  }

  void load_group(std::uint64_t group, std::uint64_t from, std::uint64_t to,
                  std::span<const std::byte* const> parts, float* zeros,
                  float* scales) const noexcept {
    const std::byte* const stored = parts[2] + group * zero_words() * word_bytes;
    for (std::uint64_t column = from; column < to; ++column) {
      const unsigned zero = form_.layout == Layout::interleaved
                                ? word_at(stored, column / 8) >> interleaved_shift(column) & 15u
                                : field_at(stored, 1, column * form_.bits, form_.bits);
      zeros[column - from] = static_cast<float>(zero_of(zero));
      scales[column - from] = scale_at(form_.scale, parts[1], group * form_.columns + column);
    }
  }

  void load_codes(std::uint64_t row, std::uint64_t first, std::uint64_t from, std::uint64_t to,
                  const std::byte* codes, float* values) const noexcept {
    if (form_.layout == Layout::interleaved) {
      const std::byte* const words = codes + (row - first) * (form_.columns / 8) * word_bytes;
      for (std::uint64_t column = from; column < to; ++column) {
        const unsigned code = word_at(words, column / 8) >> interleaved_shift(column) & 15u;
        values[column - from] = static_cast<float>(code);
      }
      return;
    }
    const std::uint64_t bit = row * form_.bits - first * form_.bits / word_bits * word_bits;
    for (std::uint64_t column = from; column < to; ++column) {
      const std::byte* const words = codes + column * word_bytes;
      values[column - from] = static_cast<float>(field_at(words, form_.columns, bit, form_.bits));
    }
  }
};

// ---- compressed-tensors: groups of columns, with one scale per row of a group

class GroupedColumns final : public WordDecoder {
 public:
  using WordDecoder::WordDecoder;

  [[nodiscard]] ByteRange part_of_rows(std::size_t part, std::uint64_t first,
                                       std::uint64_t last) const noexcept override {
    if (part == 0) return {first * row_words() * word_bytes, last * row_words() * word_bytes};
    if (part == 1) {
      const std::uint64_t size = element_bytes(form_.scale);
      if (form_.has_one_scale) return {0, size};
      return {first * form_.groups * size, last * form_.groups * size};
    }
    if (part < order_part()) {
      if (form_.has_plain_zero) return {0, 1};
      const ByteRange rows = words_of(first, last, form_.bits);
      return {rows.begin * form_.groups * word_bytes, rows.end * form_.groups * word_bytes};
    }
    if (part > order_part() || !form_.has_order) return {};
    return {0, form_.columns * word_bytes};
  }

  void decode(std::uint64_t begin, std::uint64_t end, std::span<const std::byte* const> parts,
              std::byte* target) const noexcept override {
    const std::uint64_t columns = form_.columns;
    const std::uint64_t first = begin / columns;
    const std::byte* const order = form_.has_order ? parts[order_part()] : nullptr;
    const std::size_t size = element_bytes(form_.dtype);
    alignas(64) std::array<float, run_max> values;
    for (std::uint64_t at = begin; at < end;) {
      const std::uint64_t row = at / columns;
      const std::uint64_t from = at % columns;
      const std::uint64_t count = std::min({run_max, columns - from, end - at});
      const std::byte* const words = parts[0] + (row - first) * row_words() * word_bytes;
      std::uint64_t known_group = UINT64_MAX;
      float scale = 0;
      float zero = 0;
      for (std::uint64_t i = 0; i < count; ++i) {
        const std::uint64_t group = group_of(order, 0, from + i);
        if (group != known_group) {
          scale = scale_of(row, first, group, parts[1]);
          zero = zero_of_group(row, first, group, parts);
          known_group = group;
        }
        const unsigned code = field_at(words, 1, (from + i) * form_.bits, form_.bits);
        values[i] = number::product(scale, static_cast<float>(code) - zero);
      }
      write(values.data(), count, target + (at - begin) * size);
      at += count;
    }
  }

  // Call for runs that begin at a byte.
  float take_codes(ByteRange range, const CodeRun& run, std::span<const std::byte* const> parts,
                   std::byte* codes, float* scales) const noexcept override {
    const std::uint64_t first = range.begin / form_.columns;
    const std::uint64_t row = run.begin / form_.columns;
    const std::uint64_t column = run.begin % form_.columns;
    const std::uint64_t count = run.end - run.begin;
    const std::byte* const from =
        parts[0] + (row - first) * row_words() * word_bytes + column * form_.bits / 8;
    std::memcpy(codes, from, count * form_.bits / 8);
    if (form_.bits == 8) {
      for (std::uint64_t i = 0; i < count; ++i) codes[i] ^= std::byte{0x80};
    }
    const auto half = static_cast<float>(1u << (form_.bits - 1));
    for (std::uint64_t i = 0; i * run.per_scale < count; ++i) {
      const std::uint64_t group = (column + i * run.per_scale) / form_.group_size;
      const bool is_middle = !form_.has_zeros || zero_of_group(row, first, group, parts) == half;
      scales[i] = is_middle ? scale_of(row, first, group, parts[1]) : number::invalid_nan;
    }
    return 1;
  }

 private:
  [[nodiscard]] std::uint64_t row_words() const noexcept {
    return (form_.columns * form_.bits + word_bits - 1) / word_bits;
  }
  [[nodiscard]] float scale_of(std::uint64_t row, std::uint64_t first, std::uint64_t group,
                               const std::byte* scales) const noexcept {
    const std::uint64_t index = form_.has_one_scale ? 0 : (row - first) * form_.groups + group;
    return scale_at(form_.scale, scales, index);
  }
  // Returns the zero point. Codes and packed zero points are offset by half of the codes' range.
  [[nodiscard]] float zero_of_group(std::uint64_t row, std::uint64_t first, std::uint64_t group,
                                    std::span<const std::byte* const> parts) const noexcept {
    const auto half = static_cast<float>(1u << (form_.bits - 1));
    if (!form_.has_zeros) return half;
    if (form_.has_plain_zero) {
      return half + static_cast<float>(static_cast<std::int8_t>(parts[2][0]));
    }
    const std::uint64_t bit = row * form_.bits - first * form_.bits / word_bits * word_bits;
    const std::byte* const words = parts[2] + group * word_bytes;
    return static_cast<float>(field_at(words, form_.groups, bit, form_.bits));
  }
};

}  // namespace

unsigned field_at(const std::byte* words, std::uint64_t stride, std::uint64_t bit,
                  unsigned bits) noexcept {
  const std::uint64_t word = bit / word_bits;
  const unsigned shift = static_cast<unsigned>(bit % word_bits);
  std::uint64_t value = word_at(words, word * stride);
  if (shift + bits > word_bits) {
    value |= std::uint64_t{word_at(words, (word + 1) * stride)} << word_bits;
  }
  return static_cast<unsigned>(value >> shift) & ((1u << bits) - 1);
}

void finish(const Packing& form, PreparedDecoder& made) {
  if (form.layout == Layout::across) {
    made.decoder = std::make_shared<const GroupedColumns>(form);
  } else {
    made.decoder = std::make_shared<const GroupedRows>(form);
  }
}

}  // namespace loadstone::words
