#include "codec/gguf/gguf.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "kernels/cast.h"
#include "kernels/gguf.h"
#include "kernels/gguf/nvfp4_blocks.h"
#include "kernels/gguf/tables.h"
#include "kernels/modelopt/scales.h"
#include "kernels/nibbles.h"
#include "kernels/number.h"

namespace loadstone {

namespace {

// Upper limit on the decoded bytes of one block, in any format.
constexpr std::size_t block_result_bytes_max = 256 * sizeof(float);

constexpr auto iq4_codes = [] {
  std::array<float, simd::iq4_values.size()> codes{};
  std::ranges::copy(simd::iq4_values, codes.begin());
  return codes;
}();

// The two values of each byte of E2M1 codes, the low half first.
constexpr auto e2m1_pairs = [] {
  std::array<std::array<float, 2>, 256> pairs{};
  for (std::size_t byte = 0; byte < pairs.size(); ++byte) {
    pairs[byte] = {simd::e2m1_doubled[byte & 15] * 0.5F, simd::e2m1_doubled[byte >> 4] * 0.5F};
  }
  return pairs;
}();

// Returns the codes of a format whose blocks have one scale, and an empty set for other formats.
std::span<const float> codes_of(BlockFormat format) noexcept {
  switch (format) {
    case BlockFormat::q4_0:
      return integer_codes(-8, 7);
    case BlockFormat::q4_1:
      return integer_codes(0, 15);
    case BlockFormat::q5_0:
      return integer_codes(-16, 15);
    case BlockFormat::q5_1:
      return integer_codes(0, 31);
    case BlockFormat::q8_0:
      return integer_codes(-128, 127);
    case BlockFormat::tq1_0:
      return integer_codes(-1, 1);
    case BlockFormat::tq2_0:
      return integer_codes(-1, 2);  // encoders do not write 2
    case BlockFormat::iq4_nl:
      return iq4_codes;
    case BlockFormat::mxfp4:
    case BlockFormat::nvfp4:
      return e2m1_codes;
    default:
      return {};
  }
}

std::optional<BlockGrid> grid_of(BlockFormat format) {
  BlockGrid grid = {.codes = codes_of(format), .scale = Dtype::f16, .has_signed_scales = true};
  if (grid.codes.empty()) return std::nullopt;
  grid.columns = layout(format).elements;
  if (format == BlockFormat::tq2_0) grid.symmetric_codes = integer_codes(-1, 1);
  grid.has_minimum = format == BlockFormat::q4_1 || format == BlockFormat::q5_1;
  grid.gives_codes = format == BlockFormat::mxfp4 || format == BlockFormat::q4_0;
  if (format == BlockFormat::mxfp4) grid.scale = Dtype::f8_e8m0;
  if (format == BlockFormat::nvfp4) {
    grid.scale = Dtype::f8_e4m3;
    grid.columns = scaled::nvfp4_block;
  }
  return grid;
}

class BlockDecoder final : public Decoder {
 public:
  // `grid`: nullopt if the values are bytes, or if another decoder scales them.
  BlockDecoder(DecodeBlocks kernel, BlockLayout block, Dtype dtype,
               std::optional<BlockGrid> grid = std::nullopt)
      : decode_(kernel), block_(block), dtype_(dtype), grid_(grid) {}

  [[nodiscard]] std::optional<BlockGrid> grid() const override { return grid_; }

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

  // Supports MXFP4 and Q4_0, in which a scale precedes 32 codes. The run consists of whole blocks.
  float take_codes(ByteRange range, const CodeRun& run, std::span<const std::byte* const> parts,
                   std::byte* codes, float* scales) const noexcept override {
    const std::uint64_t size = block_.elements;
    const std::byte* const blocks =
        parts[0] + (run.begin / size - range.begin / size) * block_.bytes;
    const std::uint64_t count = run.end - run.begin;
    const std::uint64_t scale_bytes = block_.bytes - size / 2;
    for (std::uint64_t i = 0; i * size < count; ++i) {
      nibbles::from_gguf(blocks + i * block_.bytes + scale_bytes, codes + i * size / 2);
    }
    for (std::uint64_t i = 0; i * run.per_scale < count; ++i) {
      const std::byte* const block = blocks + i * run.per_scale / size * block_.bytes;
      scales[i] =
          scale_bytes == 1 ? number::load<Dtype::f8_e8m0>(block) : number::load<Dtype::f16>(block);
    }
    return 1;
  }

 private:
  const DecodeBlocks decode_;  // null if the blocks are copied as bytes
  const BlockLayout block_;
  const Dtype dtype_;
  const std::optional<BlockGrid> grid_;
};

// Blocks whose values are multiplied by a scale from a separate tensor.
class ScaledBlockDecoder final : public Decoder {
 public:
  // `per_scale` is the number of values per scale.
  ScaledBlockDecoder(DecodeBlocks kernel, BlockLayout block, std::uint64_t per_scale, Dtype dtype,
                     std::optional<BlockGrid> grid)
      : blocks_(kernel, block, Dtype::f32, grid),
        block_(block),
        per_scale_(per_scale),
        size_(element_bytes(dtype)),
        cast_(cast_between(Dtype::f32, dtype)) {}

  [[nodiscard]] ByteRange part_bytes(std::size_t part, std::uint64_t begin,
                                     std::uint64_t end) const noexcept override {
    if (part != 1) return blocks_.part_bytes(part, begin, end);
    return {begin / per_scale_ * sizeof(float), ((end - 1) / per_scale_ + 1) * sizeof(float)};
  }

  [[nodiscard]] std::optional<BlockGrid> grid() const override {
    auto grid = blocks_.grid();
    if (grid) {
      grid->product = BlockProduct::twice;
      grid->gives_codes = false;
    }
    return grid;
  }

  void decode(std::uint64_t begin, std::uint64_t end, std::span<const std::byte* const> parts,
              std::byte* target) const noexcept override {
    constexpr std::uint64_t chunk = 256;
    std::array<float, chunk> numbers;
    const std::uint64_t first_block = begin / block_.elements;
    const std::uint64_t first_scale = begin / per_scale_;
    for (std::uint64_t at = begin; at < end;) {
      const std::uint64_t scale_end = (at / per_scale_ + 1) * per_scale_;
      const std::uint64_t to = std::min({end, (at / chunk + 1) * chunk, scale_end});
      const std::array<const std::byte*, 1> blocks = {
          parts[0] + (at / block_.elements - first_block) * block_.bytes};
      blocks_.decode(at, to, blocks, reinterpret_cast<std::byte*>(numbers.data()));
      float scale = 0;
      std::memcpy(&scale, parts[1] + (at / per_scale_ - first_scale) * sizeof(float),
                  sizeof(float));
      const std::uint64_t count = to - at;
      number::multiply(numbers.data(), count, scale);
      cast_.run(reinterpret_cast<const std::byte*>(numbers.data()), target, count);
      target += count * size_;
      at = to;
    }
  }

 private:
  const BlockDecoder blocks_;
  const BlockLayout block_;
  const std::uint64_t per_scale_;
  const std::size_t size_;
  const Cast cast_;
};

// NVFP4 with a scale of the matrix, which multiplies the scales of blocks, as in other files of
// NVFP4. A run of codes consists of whole blocks.
class Nvfp4Decoder final : public Decoder {
 public:
  // `per_scale` is the number of values per scale of a matrix.
  Nvfp4Decoder(std::uint64_t per_scale, Dtype dtype)
      : per_scale_(per_scale),
        size_(element_bytes(dtype)),
        cast_(cast_between(Dtype::f32, dtype)) {}

  [[nodiscard]] ByteRange part_bytes(std::size_t part, std::uint64_t begin,
                                     std::uint64_t end) const noexcept override {
    const std::uint64_t per_unit = part == 0 ? gguf_nvfp4.elements : per_scale_;
    const std::uint64_t bytes = part == 0 ? gguf_nvfp4.bytes : sizeof(float);
    return {begin / per_unit * bytes, ((end - 1) / per_unit + 1) * bytes};
  }

  [[nodiscard]] std::optional<BlockGrid> grid() const override {
    auto grid = grid_of(BlockFormat::nvfp4);
    grid->gives_codes = true;
    return grid;
  }

  void decode(std::uint64_t begin, std::uint64_t end, std::span<const std::byte* const> parts,
              std::byte* target) const noexcept override {
    std::array<float, scaled::nvfp4_block> numbers;
    for (std::uint64_t at = begin; at < end;) {
      const std::uint64_t skipped = at % numbers.size();
      const std::uint64_t count = std::min(numbers.size() - skipped, end - at);
      const Block block = load(begin, at, parts);
      const float scale = number::product(block.scale, global_of(begin, at, parts));
      for (std::size_t i = 0; i < block.codes.size(); ++i) {
        std::memcpy(numbers.data() + 2 * i,
                    &e2m1_pairs[std::to_integer<std::size_t>(block.codes[i])],
                    sizeof(e2m1_pairs[0]));
      }
      number::multiply(numbers.data(), numbers.size(), scale);
      cast_.run(reinterpret_cast<const std::byte*>(numbers.data() + skipped), target, count);
      target += count * size_;
      at += count;
    }
  }

  float take_codes(ByteRange range, const CodeRun& run, std::span<const std::byte* const> parts,
                   std::byte* codes, float* scales) const noexcept override {
    for (std::uint64_t at = run.begin; at < run.end; at += scaled::nvfp4_block) {
      const Block block = load(range.begin, at, parts);
      std::ranges::copy(block.codes, codes + (at - run.begin) / 2);
      scales[(at - run.begin) / run.per_scale] = block.scale;
    }
    return global_of(range.begin, run.begin, parts);
  }

 private:
  struct Block {
    std::array<std::byte, nvfp4_code_bytes> codes;
    float scale;
  };

  // Returns the block of the element `at`. `begin`: the first element of the parts.
  static Block load(std::uint64_t begin, std::uint64_t at,
                    std::span<const std::byte* const> parts) noexcept {
    const std::uint64_t first = begin - begin % gguf_nvfp4.elements;
    Block block;
    const std::byte scale =
        load_gguf_nvfp4(parts[0], (at - first) / scaled::nvfp4_block, block.codes.data());
    block.scale = 2 * simd::half_of_ue4m3(std::to_integer<std::uint8_t>(scale));
    return block;
  }

  [[nodiscard]] float global_of(std::uint64_t begin, std::uint64_t at,
                                std::span<const std::byte* const> parts) const noexcept {
    return number::load<Dtype::f32>(parts[1] +
                                    (at / per_scale_ - begin / per_scale_) * sizeof(float));
  }

  const std::uint64_t per_scale_;
  const std::size_t size_;
  const Cast cast_;
};

std::optional<Problem> check_part(const DecodeRequest& request, std::size_t count = 1) {
  if (request.parts.size() != count) {
    return Problem{count == 1 ? "the decoder needs a tensor of blocks"
                              : "the decoder needs a tensor of blocks and a scale",
                   std::to_string(request.parts.size()) + " tensors",
                   std::to_string(count) + (count == 1 ? " tensor" : " tensors")};
  }
  if (!request.parts[0].encoding.is_dtype()) return std::nullopt;
  return Problem{"the tensor is not in a block format of GGUF",
                 std::string(request.parts[0].encoding.name())};
}

std::optional<Problem> check_shape(const DecodeRequest& request, const Shape& made) {
  if (made == request.shape) return std::nullopt;
  return Problem{"the decoded values have a different shape", request.shape.text(), made.text()};
}

template <GgufMode mode>
std::optional<Problem> prepare(const DecodeRequest& request, PreparedDecoder& made) {
  if (auto wrong = check_part(request)) return wrong;
  const DecodePart& part = request.parts[0];
  const BlockLayout block = layout(part.encoding.block_format());
  const auto decode = gguf_decoder(part.encoding.block_format(), request.dtype, mode);
  if (decode == nullptr || block.elements * element_bytes(request.dtype) > block_result_bytes_max) {
    return Problem{"loadstone does not decode this block format to this dtype",
                   std::string(part.encoding.name()) + " to " + std::string(name(request.dtype))};
  }
  if (auto wrong = check_shape(request, part.shape)) return wrong;
  auto grid = mode == GgufMode::exact ? grid_of(part.encoding.block_format()) : std::nullopt;
  made.decoder = std::make_shared<const BlockDecoder>(decode, block, request.dtype, grid);
  return std::nullopt;
}

// Prepares blocks with one separate scale, or with one for each matrix of a stack.
std::optional<Problem> prepare_scaled(const DecodeRequest& request, PreparedDecoder& made) {
  if (auto wrong = check_part(request, 2)) return wrong;
  const DecodePart& part = request.parts[0];
  const DecodePart& scale = request.parts[1];
  const BlockFormat format = part.encoding.block_format();
  const auto decode = gguf_decoder(format, Dtype::f32, GgufMode::exact);
  if (decode == nullptr) {
    return Problem{"loadstone does not decode this block format",
                   std::string(part.encoding.name())};
  }
  if (auto wrong = check_shape(request, part.shape)) return wrong;
  const bool is_stack = part.shape.rank() == 3;
  const std::uint64_t matrices = is_stack ? part.shape[0] : 1;
  const std::uint64_t count = scale.shape.numel().value_or(0);
  if (scale.encoding != Encoding(Dtype::f32) || (count != 1 && count != matrices)) {
    return Problem{"the shape of the scale does not fit the tensor of blocks",
                   std::string(scale.encoding.name()) + " " + scale.shape.text(),
                   is_stack ? "F32 [1] or " + Shape({matrices}).text() : "F32 [1]"};
  }
  const std::uint64_t per_scale = std::max<std::uint64_t>(made.elements / count, 1);
  if (format == BlockFormat::nvfp4) {
    made.decoder = std::make_shared<const Nvfp4Decoder>(per_scale, request.dtype);
  } else {
    made.decoder = std::make_shared<const ScaledBlockDecoder>(decode, layout(format), per_scale,
                                                              request.dtype, grid_of(format));
  }
  return std::nullopt;
}

std::optional<Problem> prepare_bytes(const DecodeRequest& request, PreparedDecoder& made) {
  if (auto wrong = check_part(request)) return wrong;
  if (request.dtype != Dtype::u8) {
    return Problem{"the tensor of blocks has the wrong dtype", std::string(name(request.dtype)),
                   "U8"};
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
    DecodeKernel{"gguf_scaled", prepare_scaled},
    DecodeKernel{"bytes", prepare_bytes, true},
};

// In these encodings, llama.cpp multiplies "P.weight" by "P.scale", which is ModelOpt's
// weight_scale_2 or BitNet's weight_scale. In other encodings, "P.scale" may be a weight, as in
// Gemma's experts.
std::string_view scaled_encoding(Encoding encoding) noexcept {
  if (encoding == Encoding(BlockFormat::nvfp4)) return "nvfp4-gguf";
  if (encoding == Encoding(BlockFormat::tq1_0)) return "tq1_0";
  if (encoding == Encoding(BlockFormat::tq2_0)) return "tq2_0";
  return {};
}

std::optional<QuantizedTensor> recognise(const TensorTable& table, std::uint32_t tensor) {
  const TensorInfo& data = table[tensor];
  const std::string_view encoding = scaled_encoding(data.encoding);
  if (encoding.empty() || !data.name.ends_with(".weight")) return std::nullopt;
  const auto scale = table.find(without_suffix(data.name, "weight") + "scale");
  if (scale == TensorTable::none) return std::nullopt;
  QuantizedTensor made = quantized_tensor(data.name, tensor, {scale});
  set_decoding(table, made, encoding, {"gguf_scaled", {tensor, scale}, data.shape, Dtype::f32});
  return made;
}

}  // namespace

bool has_cut_blocks(Encoding encoding, const Shape& shape) noexcept {
  if (encoding.is_dtype() || shape.rank() == 0) return false;
  return shape.extents().back() % layout(encoding.block_format()).elements != 0;
}

bool may_have_scale(Encoding encoding) noexcept { return !scaled_encoding(encoding).empty(); }

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

extern const Family gguf_family = {.kernels = kernels,
                                   .recognise = recognise,
                                   .encodings = gguf_encodings(),
                                   .written = gguf_written()};

}  // namespace loadstone
