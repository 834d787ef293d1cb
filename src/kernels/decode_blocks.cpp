// Blocks that hold their scales: any range of elements, of whole blocks and parts of some.
#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "kernels/cast.h"
#include "kernels/decode.h"

namespace loadstone {

namespace {

// The most that one block of any format decodes to.
constexpr std::size_t block_result_bytes_max = 256 * sizeof(float);

std::optional<DecodeProblem> check_format(std::string_view kernel, const DecodePart& part,
                                          Dtype dtype, DecodeForm& form) {
  if (part.encoding.is_dtype()) {
    return DecodeProblem{"the tensor is of no block format", std::string(part.encoding.name()), {}};
  }
  form.block = layout(part.encoding.block_format());
  if (kernel == "bytes") {
    form.block = {.elements = 1, .bytes = 1};
    if (dtype == Dtype::u8) return std::nullopt;
    return DecodeProblem{"bytes are of another dtype", std::string(name(dtype)), "U8"};
  }
  const GgufMode mode = kernel == "gguf" ? GgufMode::exact : GgufMode::half;
  form.blocks = gguf_decoder(part.encoding.block_format(), dtype, mode);
  const std::size_t result_bytes = form.block.elements * element_bytes(dtype);
  if (form.blocks != nullptr && result_bytes <= block_result_bytes_max) return std::nullopt;
  return DecodeProblem{"the kernel does not decode this format to this dtype",
                       std::string(part.encoding.name()) + " to " + std::string(name(dtype)),
                       {}};
}

}  // namespace

bool decodes_blocks(std::string_view kernel) noexcept {
  return kernel == "gguf" || kernel == "gguf_half" || kernel == "bytes";
}

std::optional<DecodeProblem> prepare_block_format(std::string_view kernel, const DecodePart& part,
                                                  const Shape& shape, Dtype dtype,
                                                  DecodeForm& form) {
  if (auto wrong = check_format(kernel, part, dtype, form)) return wrong;
  auto extents = part.shape.extents();
  if (kernel == "bytes" && !extents.empty()) {
    const BlockLayout stored = layout(part.encoding.block_format());
    extents.back() = extents.back() / stored.elements * stored.bytes;
  }
  if (Shape made(extents); made != shape) {
    return DecodeProblem{"the kernel gives another shape", shape.text(), made.text()};
  }
  form.dtype = dtype;
  form.elements = shape.numel().value_or(0);
  if (form.elements == 0 || form.elements > UINT64_MAX / 8) {
    return DecodeProblem{"the kernel cannot decode as many elements", shape.text(), {}};
  }
  return std::nullopt;
}

void decode_block_format(const DecodeForm& form, std::uint64_t begin, std::uint64_t end,
                         const std::byte* blocks, std::byte* target) noexcept {
  if (form.blocks == nullptr) {
    std::memcpy(target, blocks, end - begin);
    return;
  }
  const std::size_t size = element_bytes(form.dtype);
  const std::uint64_t per_block = form.block.elements;
  alignas(64) std::array<std::byte, block_result_bytes_max> whole;
  for (std::uint64_t at = begin; at < end;) {
    const std::uint64_t inside = at % per_block;
    if (inside == 0 && end - at >= per_block) {
      const std::uint64_t count = (end - at) / per_block;
      form.blocks(blocks, count, target);
      blocks += count * form.block.bytes;
      target += count * per_block * size;
      at += count * per_block;
      continue;
    }
    const std::uint64_t count = std::min(per_block - inside, end - at);
    form.blocks(blocks, 1, whole.data());
    std::memcpy(target, whole.data() + inside * size, count * size);
    blocks += form.block.bytes;
    target += count * size;
    at += count;
  }
}

}  // namespace loadstone
