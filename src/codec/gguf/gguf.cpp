#include "codec/gguf/gguf.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "codec/gguf/encode.h"
#include "kernels/gguf.h"

namespace loadstone {

namespace {

// The most that one block of any format decodes to.
constexpr std::size_t block_result_bytes_max = 256 * sizeof(float);

class BlockDecoder final : public Decoder {
 public:
  BlockDecoder(DecodeBlocks kernel, BlockLayout block, Dtype dtype)
      : decode_(kernel), block_(block), dtype_(dtype) {}

  [[nodiscard]] ByteRange part_bytes(std::size_t part, std::uint64_t begin,
                                     std::uint64_t end) const noexcept override {
    if (part > 0) return {};
    const std::uint64_t blocks_end = (end - 1) / block_.elements + 1;
    return {begin / block_.elements * block_.bytes, blocks_end * block_.bytes};
  }

  void decode(std::uint64_t begin, std::uint64_t end, std::span<const std::byte* const> parts,
              std::byte* target) const noexcept override {
    const std::byte* blocks = parts[0];
    if (decode_ == nullptr) {
      std::memcpy(target, blocks, end - begin);
      return;
    }
    const std::size_t size = element_bytes(dtype_);
    const std::uint64_t per_block = block_.elements;
    alignas(64) std::array<std::byte, block_result_bytes_max> whole;
    for (std::uint64_t at = begin; at < end;) {
      const std::uint64_t inside = at % per_block;
      if (inside == 0 && end - at >= per_block) {
        const std::uint64_t count = (end - at) / per_block;
        decode_(blocks, count, target);
        blocks += count * block_.bytes;
        target += count * per_block * size;
        at += count * per_block;
        continue;
      }
      const std::uint64_t count = std::min(per_block - inside, end - at);
      decode_(blocks, 1, whole.data());
      std::memcpy(target, whole.data() + inside * size, count * size);
      blocks += block_.bytes;
      target += count * size;
      at += count;
    }
  }

 private:
  const DecodeBlocks decode_;  // null: the bytes are the result
  const BlockLayout block_;
  const Dtype dtype_;
};

std::optional<DecodeProblem> check_part(const DecodeRequest& request) {
  if (request.parts.size() != 1) {
    return DecodeProblem{"the kernel takes blocks",
                         std::to_string(request.parts.size()) + " tensors", "1 tensor"};
  }
  if (!request.parts[0].encoding.is_dtype()) return std::nullopt;
  return DecodeProblem{
      "the tensor is of no block format", std::string(request.parts[0].encoding.name()), {}};
}

std::optional<DecodeProblem> check_shape(const DecodeRequest& request, const Shape& made) {
  if (made == request.shape) return std::nullopt;
  return DecodeProblem{"the kernel gives another shape", request.shape.text(), made.text()};
}

template <GgufMode mode>
std::optional<DecodeProblem> prepare(const DecodeRequest& request, DecodeForm& made) {
  if (auto wrong = check_part(request)) return wrong;
  const DecodePart& part = request.parts[0];
  const BlockLayout block = layout(part.encoding.block_format());
  const auto decode = gguf_decoder(part.encoding.block_format(), request.dtype, mode);
  if (decode == nullptr || block.elements * element_bytes(request.dtype) > block_result_bytes_max) {
    return DecodeProblem{
        "the kernel does not decode this format to this dtype",
        std::string(part.encoding.name()) + " to " + std::string(name(request.dtype)),
        {}};
  }
  if (auto wrong = check_shape(request, part.shape)) return wrong;
  made.decoder = std::make_shared<const BlockDecoder>(decode, block, request.dtype);
  return std::nullopt;
}

std::optional<DecodeProblem> prepare_bytes(const DecodeRequest& request, DecodeForm& made) {
  if (auto wrong = check_part(request)) return wrong;
  if (request.dtype != Dtype::u8) {
    return DecodeProblem{"bytes are of another dtype", std::string(name(request.dtype)), "U8"};
  }
  const DecodePart& part = request.parts[0];
  if (auto wrong = check_shape(request, shape_of_bytes(part.encoding, part.shape))) return wrong;
  constexpr BlockLayout byte = {.elements = 1, .bytes = 1};
  made.decoder = std::make_shared<const BlockDecoder>(nullptr, byte, Dtype::u8);
  return std::nullopt;
}

constexpr std::array kernels = {
    DecodeKernel{"gguf", prepare<GgufMode::exact>},
    DecodeKernel{"gguf_half", prepare<GgufMode::half>},
    DecodeKernel{"bytes", prepare_bytes, true},
};

}  // namespace

bool has_cut_blocks(Encoding encoding, const Shape& shape) noexcept {
  if (encoding.is_dtype() || shape.rank() == 0) return false;
  return shape.extents().back() % layout(encoding.block_format()).elements != 0;
}

Shape shape_of_bytes(Encoding encoding, const Shape& shape) {
  auto extents = shape.extents();
  const BlockLayout block = layout(encoding.block_format());
  if (has_cut_blocks(encoding, shape)) {
    return Shape({shape.numel().value_or(0) / block.elements * block.bytes});
  }
  if (!extents.empty()) extents.back() = extents.back() / block.elements * block.bytes;
  return Shape(std::move(extents));
}

Decoding block_decoding(std::uint32_t index, const TensorInfo& tensor, Dtype dtype) {
  if (dtype != Dtype::u8) return {"gguf", {index}, tensor.shape, dtype};
  return {"bytes", {index}, shape_of_bytes(tensor.encoding, tensor.shape), dtype};
}

const Family gguf_family = {
    .kernels = kernels, .encodings = gguf_encodings(), .written = gguf_written()};

}  // namespace loadstone
