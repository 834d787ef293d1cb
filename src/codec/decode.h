// Components of a quantized tensor to its numbers, with the bits that the libraries which wrote
// them give: docs/plan-json.md says for each kernel how its tensors look and in which order it
// rounds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "base/problem.h"
#include "codec/error_bound.h"
#include "loadstone/byte_range.h"
#include "loadstone/dtype.h"
#include "loadstone/shape.h"

namespace loadstone {

// A tensor that a kernel is given: first the codes, then scales, then whatever else it needs.
struct DecodePart {
  Encoding encoding = Dtype::u8;
  Shape shape;
};

// A kernel made ready for one quantized tensor, whose numbers are counted row by row. Immutable, so
// thread-safe. Ranges of numbers are not empty.
class Decoder {
 public:
  static constexpr std::size_t parts_max = 6;

  Decoder() = default;
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;
  virtual ~Decoder() = default;

  // Bytes of a part that the numbers [begin, end) need; none of a part that there is not.
  [[nodiscard]] virtual ByteRange part_bytes(std::size_t part, std::uint64_t begin,
                                             std::uint64_t end) const noexcept = 0;
  // The most bytes, of all parts together, that one number needs.
  [[nodiscard]] virtual std::uint64_t bytes_of_one() const noexcept;
  // Writes the numbers [begin, end). `parts` hold the bytes that part_bytes() names. The same
  // bytes however the numbers are cut.
  virtual void decode(std::uint64_t begin, std::uint64_t end,
                      std::span<const std::byte* const> parts,
                      std::byte* target) const noexcept = 0;
};

// A decoder of one quantized tensor. Value type, cheap to copy.
struct PreparedDecoder {
  using Range = ByteRange;

  Dtype dtype = Dtype::f32;  // of the numbers
  std::uint64_t elements = 0;
  std::shared_ptr<const Decoder> decoder;

  [[nodiscard]] Range part_bytes(std::size_t part, std::uint64_t begin,
                                 std::uint64_t end) const noexcept {
    return decoder->part_bytes(part, begin, end);
  }
};

// The least memory that a reader decodes in: for one number, and for what it is made of.
[[nodiscard]] std::uint64_t decoding_bytes_least(const PreparedDecoder& form) noexcept;

// The parts that a kernel is given, and the numbers that it should make of them.
struct DecodeRequest {
  std::span<const DecodePart> parts;
  const Shape& shape;        // of the numbers
  Dtype dtype;               // of the numbers
  float offset;              // added to nested scales; else 0
  std::uint64_t group_size;  // numbers with one scale; 0: told by the shapes
};

// `prepare` fills in the decoder, or returns the problem. It is asked for F32, F16 or
// BF16, or for any dtype where it `makes_bytes`, and for a number of elements that is above 0 and
// sound.
struct DecodeKernel {
  std::string_view name;
  std::optional<Problem> (*prepare)(const DecodeRequest& request, PreparedDecoder& form);
  bool makes_bytes = false;
  bool takes_offset = false;
  bool takes_group_size = false;
  // Of numbers that were rounded to the nearest code, without zero points. Null: none is known.
  const ErrorBound* error = nullptr;
  // Names of the sources, the data first. None: "scale" and "scale_2".
  std::span<const std::string_view> components{};
  // A block of zeros has the scale 0. Else every scale is above zero.
  bool has_zero_scales = false;
  // Scales in U8 are codes of a table. Else they are powers of two.
  bool has_table_scales = false;
  // Scales are divided by the third component, and not multiplied with it.
  bool divides_by_outer = false;
  // The data stands in any dtype, whose values mean nothing.
  bool packs_any_dtype = false;
};

// Null where there is none of this name.
[[nodiscard]] const DecodeKernel* find_decode_kernel(std::string_view name) noexcept;

[[nodiscard]] std::optional<Problem> prepare_decoding(std::string_view kernel,
                                                      std::span<const DecodePart> parts,
                                                      const Shape& shape, Dtype dtype, float offset,
                                                      PreparedDecoder& form,
                                                      std::uint64_t group_size = 0);

// Writes the elements [begin, end) to `target`. `parts` hold the bytes that part_bytes() names;
// null where there are none. Thread-safe.
inline void decode(const PreparedDecoder& form, std::uint64_t begin, std::uint64_t end,
                   std::span<const std::byte* const> parts, std::byte* target) noexcept {
  form.decoder->decode(begin, end, parts, target);
}

}  // namespace loadstone
