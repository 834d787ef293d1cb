// Decodes the components of a quantized tensor. The values are bit-equal to those of the library
// that wrote the tensor. docs/plan-json.md specifies each kernel's tensors and order of rounding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "base/problem.h"
#include "codec/block_grid.h"
#include "codec/error_bound.h"
#include "loadstone/byte_range.h"
#include "loadstone/dtype.h"
#include "loadstone/shape.h"

namespace loadstone {

// A component that a kernel decodes. The order is: the codes, then scales, then everything else.
struct DecodePart {
  Encoding encoding = Dtype::u8;
  Shape shape;
};

// Elements of one row whose codes a decoder gives.
struct CodeRun {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  // Values per scale, which share one scale of the tensor. The run may have fewer values.
  std::uint64_t per_scale = 1;
};

// A kernel that is prepared for one quantized tensor. Elements are numbered in row-major order, and
// ranges of elements are not empty. Immutable and therefore thread-safe.
class Decoder {
 public:
  static constexpr std::size_t parts_max = 6;

  Decoder() = default;
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;
  virtual ~Decoder() = default;

  // Returns the range of bytes of a component that the elements [begin, end) need; an empty range
  // if the component is absent.
  [[nodiscard]] virtual ByteRange part_bytes(std::size_t part, std::uint64_t begin,
                                             std::uint64_t end) const noexcept = 0;
  // Returns the largest number of bytes, in all components together, that one value needs.
  [[nodiscard]] virtual std::uint64_t bytes_of_one() const noexcept;
  // Returns the values that the encoding can represent; nullopt if they are not codes times scales.
  [[nodiscard]] virtual std::optional<BlockGrid> grid() const { return std::nullopt; }
  // Writes the elements [begin, end). `parts` contain the bytes of part_bytes(). The result does
  // not depend on how the elements are divided into ranges.
  virtual void decode(std::uint64_t begin, std::uint64_t end,
                      std::span<const std::byte* const> parts,
                      std::byte* target) const noexcept = 0;
  // Writes the codes of a run: two codes of 4 bits per byte, the first in the low bits, integers
  // plus 8; or codes of 8 bits, integers in two's complement. Also writes one F32 scale per
  // `per_scale` values; NaN if they have a zero point. Returns the scale of the matrix, or 1.
  // `parts` contain the bytes of `range`. Call only if BlockGrid::gives_codes.
  virtual float take_codes(ByteRange /*range*/, const CodeRun& /*run*/,
                           std::span<const std::byte* const> /*parts*/, std::byte* /*codes*/,
                           float* /*scales*/) const noexcept {
    return 1;
  }
};

// A decoder of one quantized tensor. Value type, cheap to copy.
struct PreparedDecoder {
  using Range = ByteRange;

  Dtype dtype = Dtype::f32;  // dtype of the decoded tensor
  std::uint64_t elements = 0;
  std::shared_ptr<const Decoder> decoder;

  [[nodiscard]] Range part_bytes(std::size_t part, std::uint64_t begin,
                                 std::uint64_t end) const noexcept {
    return decoder->part_bytes(part, begin, end);
  }
};

// Returns the least memory that a reader needs to decode: enough for one value and its components.
[[nodiscard]] std::uint64_t decoding_bytes_least(const PreparedDecoder& form) noexcept;

// The arguments of DecodeKernel::prepare: the components, and the tensor to decode to.
struct DecodeRequest {
  std::span<const DecodePart> parts;
  const Shape& shape;        // shape of the decoded tensor
  Dtype dtype;               // dtype of the decoded tensor
  float offset;              // added to nested scales; 0 for kernels without nested scales
  std::uint64_t group_size;  // values per scale; 0 if the shapes determine it
};

// `prepare` sets the decoder or returns the problem. The requested dtype is F32, F16 or BF16, or
// any dtype if `makes_bytes`. The number of elements is positive and does not overflow.
struct DecodeKernel {
  std::string_view name;
  std::optional<Problem> (*prepare)(const DecodeRequest& request, PreparedDecoder& form);
  bool makes_bytes = false;
  bool takes_offset = false;
  bool takes_group_size = false;
  // Error bound of values that the encoder rounded to the nearest code. Does not apply with zero
  // points. Null if the bound is unknown.
  const ErrorBound* error = nullptr;
  // Names of the components, the codes first. If empty, the scales are "scale" and "scale_2".
  std::span<const std::string_view> components{};
  // True if scales may be 0 or negative. Otherwise every scale is above zero.
  bool has_zero_scales = false;
  // True if U8 scales are indices into a table. Otherwise they are powers of two.
  bool has_table_scales = false;
  // True if the third component divides the scales. Otherwise it multiplies them.
  bool divides_by_outer = false;
  // True if the data may have any dtype, because it is only a container of bytes.
  bool packs_any_dtype = false;
};

// Returns null for an unknown name.
[[nodiscard]] const DecodeKernel* find_decode_kernel(std::string_view name) noexcept;

[[nodiscard]] std::optional<Problem> prepare_decoding(std::string_view kernel,
                                                      std::span<const DecodePart> parts,
                                                      const Shape& shape, Dtype dtype, float offset,
                                                      PreparedDecoder& form,
                                                      std::uint64_t group_size = 0);

// Writes the elements [begin, end) to `target`. `parts` contain the bytes of part_bytes(), and null
// for absent components. Thread-safe.
inline void decode(const PreparedDecoder& form, std::uint64_t begin, std::uint64_t end,
                   std::span<const std::byte* const> parts, std::byte* target) noexcept {
  form.decoder->decode(begin, end, parts, target);
}

}  // namespace loadstone
