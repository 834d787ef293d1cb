// Decodes any range of a bitsandbytes weight.
#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "codec/bnb/weights.h"
#include "kernels/bnb.h"
#include "kernels/bnb/map_data.h"
#include "kernels/bnb/tables.h"
#include "kernels/bnb_parts.h"

namespace loadstone {

namespace {

constexpr std::array<std::string_view, 4> components = {"data", "absmax", "nested_absmax",
                                                        "nested_code"};

// Number of nested scales that are decoded at once. They fit the L1 cache.
constexpr std::uint64_t scales_max = 512;

class RowDecoder final : public Decoder {
 public:
  RowDecoder(std::uint64_t columns, Dtype dtype) : columns_(columns), dtype_(dtype) {}

  [[nodiscard]] ByteRange part_bytes(std::size_t part, std::uint64_t begin,
                                     std::uint64_t end) const noexcept override {
    if (part == 0) return {begin, end};
    if (part > 1) return {};
    return {begin / columns_ * sizeof(float), ((end - 1) / columns_ + 1) * sizeof(float)};
  }

  void decode(std::uint64_t begin, std::uint64_t end, std::span<const std::byte* const> parts,
              std::byte* target) const noexcept override {
    decode_bnb_int8(begin, end, columns_, parts[0], parts[1], dtype_, target);
  }

 private:
  const std::uint64_t columns_;
  const Dtype dtype_;
};

class FourBitDecoder final : public Decoder {
 public:
  FourBitDecoder(const Bnb4& form, bool is_nested, float offset, Dtype dtype)
      : form_(form), is_nested_(is_nested), offset_(offset), dtype_(dtype) {}

  [[nodiscard]] ByteRange part_bytes(std::size_t part, std::uint64_t begin,
                                     std::uint64_t end) const noexcept override {
    if (part == 0) return {begin / 2, end / 2 + end % 2};
    if (part > 1 && !is_nested_) return {};
    if (part == 3) return {0, bnb_dynamic_map().size_bytes()};
    if (part > 3) return {};
    std::uint64_t unit = form_.block_size;
    if (part == 2) unit *= bnb_nested_block_size;
    const std::uint64_t size = is_nested_ && part == 1 ? 1 : sizeof(float);
    return {begin / unit * size, ((end - 1) / unit + 1) * size};
  }

  void decode(std::uint64_t begin, std::uint64_t end, std::span<const std::byte* const> parts,
              std::byte* target) const noexcept override {
    if (!is_nested_) {
      decode_bnb4(form_, begin, end, parts[0], parts[1], dtype_, target);
      return;
    }
    const std::uint64_t size = form_.block_size;
    const std::uint64_t first_block = begin / size;
    const std::uint64_t first_nested = first_block / bnb_nested_block_size;
    std::array<float, scales_max> absmax;
    auto* const scales = reinterpret_cast<std::byte*>(absmax.data());
    for (std::uint64_t at = begin; at < end;) {
      const std::uint64_t block = at / size;
      const std::uint64_t until = std::min(end, (block + scales_max) * size);
      const std::uint64_t blocks_end = (until - 1) / size + 1;
      decode_bnb_nested(block, blocks_end, parts[1] + (block - first_block),
                        parts[2] + (block / bnb_nested_block_size - first_nested) * sizeof(float),
                        parts[3], offset_, scales);
      decode_bnb4(form_, at, until, parts[0] + (at / 2 - begin / 2), scales, dtype_,
                  target + (at - begin) * element_bytes(dtype_));
      at = until;
    }
  }

 private:
  const Bnb4 form_;
  const bool is_nested_;
  const float offset_;
  const Dtype dtype_;
};

std::optional<std::uint64_t> block_size_of(std::uint64_t elements, std::uint64_t scales) noexcept {
  for (std::uint64_t size = 32; size <= 4096; size *= 2) {
    if (elements / size + (elements % size != 0 ? 1u : 0u) == scales) return size;
  }
  return std::nullopt;
}

// Applies check_bnb_parts() to the dtypes and shapes of a request.
std::optional<Problem> check(const DecodeRequest& request, BnbEncoding encoding,
                             std::uint64_t block_size) {
  std::vector<BnbPart> checked;
  for (std::size_t i = 0; i < request.parts.size(); ++i) {
    const DecodePart& part = request.parts[i];
    if (!part.encoding.is_dtype()) {
      return Problem{"a component is in a block format of GGUF", std::string(part.encoding.name())};
    }
    checked.push_back({std::string(components[i]), part.encoding.dtype(), part.shape});
  }
  // The nested offset is a field of the request, not a part.
  if (request.parts.size() == 4) checked.push_back({"nested_offset", Dtype::f32, Shape()});
  const auto problem = check_bnb_parts(encoding, request.shape, block_size, checked);
  if (!problem) return std::nullopt;
  return Problem{"'" + problem->part + "': " + problem->message, problem->found, problem->expected};
}

template <BnbEncoding encoding>
std::optional<Problem> prepare(const DecodeRequest& request, PreparedDecoder& made) {
  constexpr bool by_rows = encoding == BnbEncoding::int8;
  const bool nested = request.parts.size() == 4;
  if (request.parts.size() != 2 && (!nested || by_rows)) {
    return Problem{
        "the kernel needs packed bytes and absmax, and for nested scales also nested_absmax and "
        "nested_code",
        std::to_string(request.parts.size()) + " tensors", "2 or 4 tensors"};
  }
  if (!nested && request.offset != 0) {
    return Problem{"an offset was passed, but the scales are not nested",
                   std::to_string(request.offset), "0"};
  }
  const auto block_size =
      by_rows ? 64 : block_size_of(made.elements, request.parts[1].shape.numel().value_or(0));
  if (!block_size) {
    return Problem{"no block size fits this number of scales", request.parts[1].shape.text(),
                   request.shape.text()};
  }
  if (auto wrong = check(request, encoding, *block_size)) return wrong;
  if constexpr (by_rows) {
    made.decoder =
        std::make_shared<const RowDecoder>(request.shape[request.shape.rank() - 1], request.dtype);
  } else {
    Bnb4 form;
    form.code = encoding == BnbEncoding::fp4 ? Bnb4Code::fp4 : Bnb4Code::nf4;
    form.block_size = static_cast<std::uint32_t>(*block_size);
    made.decoder =
        std::make_shared<const FourBitDecoder>(form, nested, request.offset, request.dtype);
  }
  return std::nullopt;
}

// A nested scale is off by at most half of the widest gap of its table, whose last value is 1.
constexpr ErrorBound with_nested_scales(ErrorBound bound) noexcept {
  double gap = 0;
  for (std::size_t i = 0; i + 1 < simd::bnb_map.size(); ++i) {
    gap = std::max(gap, double{simd::bnb_map[i + 1]} - simd::bnb_map[i]);
  }
  return error_bound::with_scale_codes(bound, gap / 2, std::byte{0xff});
}

// The encoder first casts values to F16, whose smallest subnormal is 2^-24.
constexpr ErrorBound by_way_of_f16(ErrorBound bound) noexcept {
  bound.constant = 0x1p-25;
  return bound;
}

// A scale below 2^-128 has an infinite inverse. Then values get the outermost codes, or code 0.
constexpr ErrorBound with_inverse_scales(ErrorBound bound) noexcept {
  bound.constant = 0x1p-127;
  return bound;
}

constexpr ErrorBound nf4_error = with_inverse_scales(
    with_nested_scales(error_bound::of_table(simd::nf4_values, std::byte{0xff})));
constexpr ErrorBound fp4_error = with_inverse_scales(
    with_nested_scales(error_bound::of_table(simd::fp4_values, std::byte{0x33})));
constexpr ErrorBound int8_error =
    by_way_of_f16(error_bound::of_integers(127, std::byte{0x7f}, Dtype::i8));

constexpr DecodeKernel four_bit(std::string_view name, decltype(DecodeKernel::prepare) prepare,
                                const ErrorBound& error) noexcept {
  return {.name = name,
          .prepare = prepare,
          .takes_offset = true,
          .error = &error,
          .components = components,
          .has_zero_scales = true,
          .has_table_scales = true,
          .packs_any_dtype = true};
}

constexpr std::array kernels = {
    four_bit("bnb_nf4", prepare<BnbEncoding::nf4>, nf4_error),
    four_bit("bnb_fp4", prepare<BnbEncoding::fp4>, fp4_error),
    DecodeKernel{.name = "bnb_int8",
                 .prepare = prepare<BnbEncoding::int8>,
                 .error = &int8_error,
                 .components = components,
                 .has_zero_scales = true},
};

}  // namespace

std::span<const DecodeKernel> bnb_kernels() noexcept { return kernels; }

}  // namespace loadstone
