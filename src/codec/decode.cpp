#include "codec/decode.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "base/text.h"
#include "codec/families.h"

namespace loadstone {

const DecodeKernel* find_decode_kernel(std::string_view name) noexcept {
  for (const Family* const family : families()) {
    const auto found = std::ranges::find(family->kernels, name, &DecodeKernel::name);
    if (found != family->kernels.end()) return &*found;
  }
  return nullptr;
}

// Adds up the bytes that the first value needs. Layouts whose values differ in this override it.
std::uint64_t Decoder::bytes_of_one() const noexcept {
  std::uint64_t bytes = 0;
  for (std::size_t part = 0; part < parts_max; ++part) bytes += part_bytes(part, 0, 1).size();
  return bytes;
}

std::uint64_t decoding_bytes_least(const PreparedDecoder& form) noexcept {
  return std::max<std::uint64_t>(2 * form.decoder->bytes_of_one(), 2 * element_bytes_max);
}

std::optional<Problem> prepare_decoding(std::string_view kernel, std::span<const DecodePart> parts,
                                        const Shape& shape, Dtype dtype, float offset,
                                        PreparedDecoder& form, std::uint64_t group_size) {
  form = {.dtype = dtype, .elements = shape.numel().value_or(0), .decoder = {}};
  const DecodeKernel* const found = find_decode_kernel(kernel);
  if (found == nullptr) {
    return Problem{"no decoder has this name", std::string(kernel),
                   "fp8_block, nvfp4, mxfp4, bnb_nf4, gguf ..."};
  }
  if (parts.empty() || parts.size() > Decoder::parts_max) {
    return Problem{"the number of tensors is wrong for this decoder",
                   counted(parts.size(), "tensor")};
  }
  if (offset != 0 && !found->takes_offset) {
    return Problem{"this decoder does not support an offset of the scales", std::to_string(offset),
                   "0"};
  }
  if (group_size != 0 && !found->takes_group_size) {
    return Problem{"this decoder does not support groups", std::to_string(group_size), "0"};
  }
  const bool is_given = dtype == Dtype::f32 || dtype == Dtype::bf16 || dtype == Dtype::f16;
  if (!is_given && !found->makes_bytes) {
    return Problem{"this decoder does not support this output dtype", std::string(name(dtype)),
                   "F32, BF16 or F16"};
  }
  // Kernels multiply the number of elements by sizes of up to 8 bytes, which must not overflow.
  if (form.elements == 0 || form.elements > UINT64_MAX / 8) {
    return Problem{"this decoder does not support so large a tensor", shape.text()};
  }
  return found->prepare({parts, shape, dtype, offset, group_size}, form);
}

}  // namespace loadstone
