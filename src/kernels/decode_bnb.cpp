// Weights of bitsandbytes as sources: any range of their numbers.
#include <algorithm>
#include <array>
#include <string>

#include "kernels/bnb_parts.h"
#include "kernels/cast.h"
#include "kernels/decode.h"

namespace loadstone {

namespace {

// Scales that are decoded in one go: they stay in the first-level cache.
constexpr std::uint64_t scales_max = 512;

std::optional<std::uint64_t> block_size_of(std::uint64_t elements, std::uint64_t scales) noexcept {
  for (std::uint64_t size = 32; size <= 4096; size *= 2) {
    if (elements / size + (elements % size != 0 ? 1u : 0u) == scales) return size;
  }
  return std::nullopt;
}

DecodeProblem as_problem(const BnbProblem& problem) {
  return {"'" + problem.part + "': " + problem.message, problem.found, problem.expected};
}

}  // namespace

bool decodes_bnb(std::string_view kernel) noexcept {
  return kernel == "bnb_nf4" || kernel == "bnb_fp4" || kernel == "bnb_int8";
}

std::optional<DecodeProblem> prepare_bnb(std::string_view kernel, std::span<const DecodePart> parts,
                                         const Shape& shape, Dtype dtype, float offset,
                                         DecodeForm& form) {
  const auto encoding = bnb_encoding(kernel.substr(4));
  const bool by_rows = encoding == BnbEncoding::int8;
  const bool nested = parts.size() == 4;
  if (!encoding || (parts.size() != 2 && (!nested || by_rows))) {
    return DecodeProblem{
        "the kernel takes packed bytes and absmax, or these, nested_absmax and "
        "nested_code",
        std::to_string(parts.size()) + " tensors", "2 or 4 tensors"};
  }
  constexpr std::array names = {"data", "absmax", "nested_absmax", "nested_code"};
  std::vector<BnbPart> checked;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (!parts[i].encoding.is_dtype()) {
      return DecodeProblem{
          "a part is of a block format", std::string(parts[i].encoding.name()), {}};
    }
    checked.push_back({names[i], parts[i].encoding.dtype(), parts[i].shape});
  }
  // Where it is no part of its own it comes with the form.
  if (nested) checked.push_back({"nested_offset", Dtype::f32, Shape()});
  if (!nested && offset != 0) {
    return DecodeProblem{"an offset of scales that are not nested", std::to_string(offset), "0"};
  }
  form.elements = shape.numel().value_or(0);
  const auto block_size =
      by_rows ? 64 : block_size_of(form.elements, parts[1].shape.numel().value_or(0));
  if (!block_size) {
    return DecodeProblem{"no size of blocks gives so many scales", parts[1].shape.text(),
                         shape.text()};
  }
  if (auto problem = check_bnb_parts(*encoding, shape, *block_size, checked)) {
    return as_problem(*problem);
  }
  if (dtype != Dtype::f32 && dtype != Dtype::bf16 && dtype != Dtype::f16) {
    return DecodeProblem{"the kernel does not give this dtype", std::string(name(dtype)),
                         "F32, BF16 or F16"};
  }
  if (form.elements == 0 || form.elements > UINT64_MAX / 8) {
    return DecodeProblem{"the kernel cannot decode as many elements", shape.text(), {}};
  }
  form.dtype = dtype;
  form.weight = Dtype::u8;
  form.columns = shape[shape.rank() - 1];
  form.offset = offset;
  form.bnb = by_rows  ? DecodeForm::Bnb::rows
             : nested ? DecodeForm::Bnb::nested_blocks
                      : DecodeForm::Bnb::blocks;
  form.bnb4.code = encoding == BnbEncoding::fp4 ? Bnb4Code::fp4 : Bnb4Code::nf4;
  form.bnb4.block_size = static_cast<std::uint32_t>(*block_size);
  return std::nullopt;
}

DecodeForm::Range bnb_part_bytes(const DecodeForm& form, std::size_t part, std::uint64_t begin,
                                 std::uint64_t end) noexcept {
  const bool nested = form.bnb == DecodeForm::Bnb::nested_blocks;
  if (part > 1 && !nested) return {};
  if (part == 3) return {0, bnb_dynamic_map().size_bytes()};
  std::uint64_t unit = form.bnb == DecodeForm::Bnb::rows ? form.columns : form.bnb4.block_size;
  if (part == 2) unit *= bnb_nested_block_size;
  const std::uint64_t size = nested && part == 1 ? 1 : sizeof(float);
  return {begin / unit * size, ((end - 1) / unit + 1) * size};
}

void decode_bnb(const DecodeForm& form, std::uint64_t begin, std::uint64_t end,
                std::span<const std::byte* const> parts, std::byte* target) noexcept {
  if (form.bnb == DecodeForm::Bnb::rows) {
    decode_bnb_int8(begin, end, form.columns, parts[0], parts[1], form.dtype, target);
    return;
  }
  if (form.bnb == DecodeForm::Bnb::blocks) {
    decode_bnb4(form.bnb4, begin, end, parts[0], parts[1], form.dtype, target);
    return;
  }
  const std::uint64_t size = form.bnb4.block_size;
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
                      parts[3], form.offset, scales);
    decode_bnb4(form.bnb4, at, until, parts[0] + (at / 2 - begin / 2), scales, form.dtype,
                target + (at - begin) * element_bytes(form.dtype));
    at = until;
  }
}

}  // namespace loadstone
