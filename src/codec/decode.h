// Decodes components of a quantized tensor to values, with the bits of the libraries that wrote
// them: docs/plan-json.md specifies the tensors and the order of rounding of each kernel.
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

// An input of a kernel: first the codes, then scales, then everything else.
struct DecodePart {
  Encoding encoding = Dtype::u8;
  Shape shape;
};

// A kernel prepared for one quantized tensor, with elements in row-major order. Immutable, so
// thread-safe. Ranges of elements are not empty.
class Decoder {
 public:
  static constexpr std::size_t parts_max = 6;

  Decoder() = default;
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;
  virtual ~Decoder() = default;

  // Bytes of a component that the elements [begin, end) need; empty for an absent component.
  [[nodiscard]] virtual ByteRange part_bytes(std::size_t part, std::uint64_t begin,
                                             std::uint64_t end) const noexcept = 0;
  // The most bytes, of all parts together, that one number needs.
  [[nodiscard]] virtual std::uint64_t bytes_of_one() const noexcept;
  // Writes the elements [begin, end). `parts` contain the bytes of part_bytes(). The division into
  // ranges does not change the bytes.
  virtual void decode(std::uint64_t begin, std::uint64_t end,
                      std::span<const std::byte* const> parts,
                      std::byte* target) const noexcept = 0;
};

// A decoder of one quantized tensor. Value type, cheap to copy.
struct PreparedDecoder {
  using Range = ByteRange;

  Dtype dtype = Dtype::f32;  // of the decoded tensor
  std::uint64_t elements = 0;
  std::shared_ptr<const Decoder> decoder;

  [[nodiscard]] Range part_bytes(std::size_t part, std::uint64_t begin,
                                 std::uint64_t end) const noexcept {
    return decoder->part_bytes(part, begin, end);
  }
};

// The least memory in which a reader can decode: for one value with its components.
[[nodiscard]] std::uint64_t decoding_bytes_least(const PreparedDecoder& form) noexcept;

// The inputs of a kernel, and the tensor to make.
struct DecodeRequest {
  std::span<const DecodePart> parts;
  const Shape& shape;        // of the decoded tensor
  Dtype dtype;               // of the decoded tensor
  float offset;              // added to nested scales; otherwise 0
  std::uint64_t group_size;  // values per scale; 0: determined by shapes
};

// `prepare` sets the decoder or returns the problem. The dtype is F32, F16 or BF16, or any dtype if
// it `makes_bytes`; the number of elements is positive and does not overflow.
struct DecodeKernel {
  std::string_view name;
  std::optional<Problem> (*prepare)(const DecodeRequest& request, PreparedDecoder& form);
  bool makes_bytes = false;
  bool takes_offset = false;
  bool takes_group_size = false;
  // Bound for values rounded to the nearest code, without zero points. Null: unknown.
  const ErrorBound* error = nullptr;
  // Names of the sources, the data first. None: "scale" and "scale_2".
  std::span<const std::string_view> components{};
  // A block of zeros has the scale 0. Else every scale is above zero.
  bool has_zero_scales = false;
  // Scales in U8 are codes of a table. Else they are powers of two.
  bool has_table_scales = false;
  // Scales are divided by the third component, and not multiplied with it.
  bool divides_by_outer = false;
  // The data may have any dtype, whose values are meaningless.
  bool packs_any_dtype = false;
};

// Returns null for an unknown name.
[[nodiscard]] const DecodeKernel* find_decode_kernel(std::string_view name) noexcept;

[[nodiscard]] std::optional<Problem> prepare_decoding(std::string_view kernel,
                                                      std::span<const DecodePart> parts,
                                                      const Shape& shape, Dtype dtype, float offset,
                                                      PreparedDecoder& form,
                                                      std::uint64_t group_size = 0);

// Writes the elements [begin, end) to `target`. `parts` contain the bytes of part_bytes(), null for
// absent components. Thread-safe.
inline void decode(const PreparedDecoder& form, std::uint64_t begin, std::uint64_t end,
                   std::span<const std::byte* const> parts, std::byte* target) noexcept {
  form.decoder->decode(begin, end, parts, target);
}

}  // namespace loadstone
