#include "codec/fp4/blocks.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "codec/gguf/gguf.h"
#include "kernels/nibbles.h"

namespace loadstone {

namespace {

constexpr std::string_view blocks_kernel = "mxfp4_blocks";
constexpr std::uint64_t block_elements = 32;
constexpr std::uint64_t code_bytes = block_elements / 2;
constexpr std::uint64_t block_bytes = 1 + code_bytes;

// The output of a decoder for each block.
enum class Made : std::uint8_t { blocks, codes, scales };

constexpr std::uint64_t made_bytes(Made made) noexcept {
  return made == Made::blocks ? block_bytes : made == Made::codes ? code_bytes : 1;
}

template <Made made>
class BlockBytes final : public Decoder {
 public:
  [[nodiscard]] ByteRange part_bytes(std::size_t part, std::uint64_t begin,
                                     std::uint64_t end) const noexcept override {
    const std::uint64_t first = begin / size;
    const std::uint64_t last = (end - 1) / size + 1;
    if (made == Made::blocks && part == 0) return {first * code_bytes, last * code_bytes};
    if (made == Made::blocks && part == 1) return {first, last};
    if (part == 0) return {first * block_bytes, last * block_bytes};
    return {};
  }

  void decode(std::uint64_t begin, std::uint64_t end, std::span<const std::byte* const> parts,
              std::byte* target) const noexcept override {
    std::array<std::byte, size> whole;
    const std::uint64_t first = begin / size;
    for (std::uint64_t at = begin; at < end;) {
      const std::uint64_t inside = at % size;
      const std::uint64_t count = std::min(size - inside, end - at);
      if (size == 1 || count == size) {
        make(parts, at / size - first, target);
        target += count;
        at += count;
        continue;
      }
      make(parts, at / size - first, whole.data());
      std::memcpy(target, whole.data() + inside, count);
      target += count;
      at += count;
    }
  }

 private:
  static constexpr std::uint64_t size = made_bytes(made);

  static void make(std::span<const std::byte* const> parts, std::uint64_t block,
                   std::byte* to) noexcept {
    if constexpr (made == Made::blocks) {
      to[0] = parts[1][block];
      nibbles::to_gguf(parts[0] + block * code_bytes, to + 1);
    } else if constexpr (made == Made::codes) {
      nibbles::from_gguf(parts[0] + block * block_bytes + 1, to);
    } else {
      to[0] = parts[0][block * block_bytes];
    }
  }
};

std::optional<Problem> check_bytes(const DecodeRequest& request, std::size_t parts) {
  if (request.parts.size() != parts) {
    return Problem{"the number of tensors is wrong for this decoder",
                   std::to_string(request.parts.size()) + " tensors",
                   std::to_string(parts) + " tensors"};
  }
  if (request.dtype != Dtype::u8) {
    return Problem{"the tensor of bytes has the wrong dtype", std::string(name(request.dtype)),
                   "U8"};
  }
  return std::nullopt;
}

Shape with_columns(const Shape& shape, std::uint64_t columns) {
  auto extents = shape.extents();
  extents.back() = columns;
  return Shape(std::move(extents));
}

bool is_byte(Encoding encoding) noexcept {
  return encoding == Encoding(Dtype::u8) || encoding == Encoding(Dtype::i8) ||
         encoding == Encoding(Dtype::f8_e8m0);
}

std::optional<Problem> prepare_blocks(const DecodeRequest& request, PreparedDecoder& made) {
  if (auto wrong = check_bytes(request, 2)) return wrong;
  const auto blocks = request.parts[1].shape.numel();
  const auto codes = request.parts[0].shape.numel();
  const bool is_whole = blocks && codes && *codes / code_bytes == *blocks &&
                        *codes % code_bytes == 0 && made.elements % block_bytes == 0 &&
                        made.elements / block_bytes == *blocks;
  const bool is_in_rows =
      request.shape.rank() > 0 && request.shape.extents().back() % block_bytes == 0;
  if (!is_whole || !is_in_rows || !is_byte(request.parts[0].encoding) ||
      !is_byte(request.parts[1].encoding)) {
    return Problem{"the codes and scales do not fill whole MXFP4 blocks",
                   request.parts[0].shape.text() + " and " + request.parts[1].shape.text(),
                   "bytes of blocks " + request.shape.text()};
  }
  made.decoder = std::make_shared<const BlockBytes<Made::blocks>>();
  return std::nullopt;
}

template <Made part>
std::optional<Problem> prepare_part(const DecodeRequest& request, PreparedDecoder& made) {
  if (auto wrong = check_bytes(request, 1)) return wrong;
  const DecodePart& blocks = request.parts[0];
  if (blocks.encoding != Encoding(BlockFormat::mxfp4)) {
    return Problem{"the tensor has a different block format", std::string(blocks.encoding.name()),
                   "MXFP4"};
  }
  const std::uint64_t columns = blocks.shape.extents().back();
  const Shape expected = with_columns(blocks.shape, columns / block_elements * made_bytes(part));
  if (request.shape != expected) {
    return Problem{"the decoded values have a different shape", request.shape.text(),
                   expected.text()};
  }
  made.decoder = std::make_shared<const BlockBytes<part>>();
  return std::nullopt;
}

}  // namespace

const std::array<DecodeKernel, 3> mxfp4_block_kernels = {
    DecodeKernel{.name = blocks_kernel, .prepare = prepare_blocks, .makes_bytes = true},
    DecodeKernel{.name = "mxfp4_codes", .prepare = prepare_part<Made::codes>, .makes_bytes = true},
    DecodeKernel{
        .name = "mxfp4_scales", .prepare = prepare_part<Made::scales>, .makes_bytes = true},
};

bool gives_mxfp4_blocks(const Decoding& decoding) noexcept {
  return decoding.kernel == blocks_kernel;
}

std::optional<Decoding> mxfp4_blocks_of(const Decoding& numbers,
                                        const std::vector<TensorInfo>& tensors) {
  if (numbers.kernel != "mxfp4" && numbers.kernel != "fp4_block") return std::nullopt;
  const auto& extents = numbers.shape.extents();
  if (numbers.sources.size() != 2 || extents.empty()) return std::nullopt;
  const TensorInfo& scales = tensors[numbers.sources[1]];
  // Blocks of a different size, or with two dimensions, have a different number of scales.
  const auto& groups = scales.shape.extents();
  if (extents.back() % block_elements != 0 || !is_byte(scales.encoding) || groups.empty() ||
      groups.back() != extents.back() / block_elements ||
      scales.shape.numel() != numbers.shape.numel().value_or(0) / block_elements) {
    return std::nullopt;
  }
  return Decoding{std::string(blocks_kernel), numbers.sources,
                  shape_of_bytes(BlockFormat::mxfp4, numbers.shape), Dtype::u8};
}

Decoding mxfp4_codes_of(std::uint32_t tensor, const Shape& shape) {
  return {"mxfp4_codes", {tensor}, with_columns(shape, shape.extents().back() / 2), Dtype::u8};
}

Decoding mxfp4_scales_of(std::uint32_t tensor, const Shape& shape) {
  const std::uint64_t blocks = shape.extents().back() / block_elements;
  return {"mxfp4_scales", {tensor}, with_columns(shape, blocks), Dtype::u8};
}

}  // namespace loadstone
