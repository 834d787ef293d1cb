// Recognises and decodes MLX: "P.weight" in U32 with "P.scales", and "P.biases" in the affine mode.
// See docs/formats/mlx.md
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "base/ceil_div.h"
#include "base/text.h"
#include "codec/families.h"
#include "codec/scaled/scaled.h"
#include "codec/words/words.h"
#include "kernels/cast.h"
#include "kernels/modelopt/scales.h"
#include "kernels/number.h"

namespace loadstone {

namespace {

constexpr std::uint32_t none = TensorTable::none;
constexpr std::uint64_t word_bits = 32;
constexpr std::uint64_t word_bytes = 4;
constexpr std::uint64_t run_max = 128;  // the largest group of MLX

// ---- Decoding the affine mode: codes are a bit stream along each row, with a scale and a bias for
// each group of a row

struct Affine {
  unsigned bits = 4;
  std::uint64_t columns = 1;
  std::uint64_t groups = 1;  // of a row
  Dtype scale = Dtype::f16;
  Dtype dtype = Dtype::f32;
};

class AffineDecoder final : public Decoder {
 public:
  explicit AffineDecoder(const Affine& form) : form_(form) {}

  [[nodiscard]] ByteRange part_bytes(std::size_t part, std::uint64_t begin,
                                     std::uint64_t end) const noexcept override {
    if (part > 2) return {};
    if (part == 0) return {word_of(begin) * word_bytes, (word_of(end - 1, 1) + 1) * word_bytes};
    const std::uint64_t size = element_bytes(form_.scale);
    return {begin / per_group() * size, ((end - 1) / per_group() + 1) * size};
  }

  void decode(std::uint64_t begin, std::uint64_t end, std::span<const std::byte* const> parts,
              std::byte* target) const noexcept override {
    std::array<float, run_max> values;
    const Cast round = cast_between(Dtype::f32, form_.dtype);
    for (std::uint64_t at = begin; at < end;) {
      const std::uint64_t group = at / per_group();
      const std::uint64_t count = std::min({run_max, (group + 1) * per_group() - at, end - at});
      const std::uint64_t index = group - begin / per_group();
      const float scale = load(parts[1], index);
      const float bias = load(parts[2], index);
      const std::byte* const words = parts[0] + (word_of(at) - word_of(begin)) * word_bytes;
      const std::uint64_t first_bit = at % form_.columns * form_.bits % word_bits;
      for (std::uint64_t i = 0; i < count; ++i) {
        const unsigned code = words::field_at(words, 1, first_bit + i * form_.bits, form_.bits);
        values[i] = number::sum(number::product(scale, static_cast<float>(code)), bias);
      }
      round.run(reinterpret_cast<const std::byte*>(values.data()),
                target + (at - begin) * element_bytes(form_.dtype), count);
      at += count;
    }
  }

 private:
  [[nodiscard]] std::uint64_t per_group() const noexcept { return form_.columns / form_.groups; }
  // Returns the word that contains the first bit of an element, or its last bit if `is_last`.
  [[nodiscard]] std::uint64_t word_of(std::uint64_t element, unsigned is_last = 0) const noexcept {
    const std::uint64_t row_words = form_.columns * form_.bits / word_bits;
    const std::uint64_t bit = element % form_.columns * form_.bits + is_last * (form_.bits - 1);
    return element / form_.columns * row_words + bit / word_bits;
  }
  [[nodiscard]] float load(const std::byte* from, std::uint64_t index) const noexcept {
    if (form_.scale == Dtype::f16) return number::load<Dtype::f16>(from + 2 * index);
    if (form_.scale == Dtype::bf16) return number::load<Dtype::bf16>(from + 2 * index);
    return number::load<Dtype::f32>(from + 4 * index);
  }

  const Affine form_;
};

// Returns the bits of a code for rows of `words` words; 0 if MLX does not pack such rows.
unsigned bits_of(std::uint64_t words, std::uint64_t columns) noexcept {
  for (const unsigned bits : {1u, 2u, 3u, 4u, 5u, 6u, 8u}) {
    if (columns / word_bits * bits == words && columns % word_bits == 0) return bits;
  }
  return 0;
}

std::optional<Problem> prepare_affine(const DecodeRequest& request, PreparedDecoder& made) {
  const auto& parts = request.parts;
  if (parts.size() != 3) {
    return Problem{"the decoder needs words, scales and biases", counted(parts.size(), "tensor"),
                   "3 tensors"};
  }
  const std::size_t rank = request.shape.rank();
  const Shape& words = parts[0].shape;
  const Shape& scales = parts[1].shape;
  if (!scaled::is_one_of(parts[0].encoding, {Dtype::u32}) || rank < 2 || words.rank() != rank) {
    return Problem{"the decoder does not support these codes",
                   fmt::format("{} {}", parts[0].encoding.name(), words.text()), "U32 words"};
  }
  Affine form = {.columns = request.shape[rank - 1], .dtype = request.dtype};
  form.bits = bits_of(words[rank - 1], form.columns);
  auto expected = request.shape.extents();
  expected.back() = words[rank - 1];
  if (form.bits == 0 || words != Shape(expected)) {
    return Problem{"the number of words does not fit the shape", words.text(),
                   request.shape.text()};
  }
  if (!scaled::is_one_of(parts[1].encoding, {Dtype::f32, Dtype::f16, Dtype::bf16})) {
    return Problem{"the decoder does not support the dtype of the scales",
                   std::string(parts[1].encoding.name()), "F32, F16 or BF16"};
  }
  form.scale = parts[1].encoding.dtype();
  form.groups = scales.rank() == rank ? scales[rank - 1] : 0;
  expected.back() = form.groups;
  const bool is_even = form.groups != 0 && form.columns % form.groups == 0;
  if (!is_even || scales != Shape(expected)) {
    return Problem{"the scales do not divide the rows into groups", scales.text(),
                   request.shape.text()};
  }
  if (parts[2].encoding != parts[1].encoding || parts[2].shape != scales) {
    return Problem{"the scales and biases differ in dtype or shape", parts[2].shape.text(),
                   scales.text()};
  }
  made.decoder = std::make_shared<const AffineDecoder>(form);
  return std::nullopt;
}

// ---- Decoding the other modes, whose words are the bytes of small floats

// Codes per word, and values per scale.
struct Mode {
  std::string_view encoding;
  const char* kernel;
  std::uint64_t per_word;
  std::uint64_t per_scale;
};
constexpr std::array modes = {
    Mode{"mxfp4-mlx", "mlx_mxfp4", 8, simd::mx_block},
    Mode{"nvfp4-mlx", "mlx_nvfp4", 8, scaled::nvfp4_block},
    Mode{"mxfp8-mlx", "mlx_mxfp8", 4, simd::mx_block},
};

template <std::size_t mode>
std::optional<Problem> prepare_mode(const DecodeRequest& request, PreparedDecoder& made) {
  constexpr Mode its = modes[mode];
  scaled::Layout form = {
      .codes = its.per_word == 8 ? scaled::Codes::fp4 : scaled::Codes::bytes,
      .scale = its.per_scale == scaled::nvfp4_block ? Dtype::f8_e4m3 : Dtype::u8};
  if (auto wrong = scaled::check_codes(request, 2, {Dtype::u32}, "U32", its.per_word)) return wrong;
  if (!scaled::is_one_of(request.parts[1].encoding, {Dtype::u8})) {
    return Problem{"the decoder does not support the dtype of the scales",
                   std::string(request.parts[1].encoding.name()), "U8"};
  }
  if (auto wrong = scaled::cut_evenly(request, form)) return wrong;
  scaled::finish(form, made);
  return std::nullopt;
}

constexpr std::array<std::string_view, 3> components = {"data", "scale", "bias"};

constexpr std::array kernels = {
    DecodeKernel{.name = "mlx_affine",
                 .prepare = prepare_affine,
                 .components = components,
                 .has_zero_scales = true},
    DecodeKernel{.name = modes[0].kernel, .prepare = prepare_mode<0>},
    DecodeKernel{.name = modes[1].kernel, .prepare = prepare_mode<1>, .has_zero_scales = true},
    DecodeKernel{.name = modes[2].kernel, .prepare = prepare_mode<2>},
};

// ---- recognising

// Returns the columns of a matrix in the affine mode, or 0 if neither the config nor the shapes
// determine them: rows of equal size contain codes of 4 bits in groups of 64, or of 8 bits in
// groups of 32.
std::uint64_t affine_columns(const QuantizationClaim& claim, const std::string& module,
                             std::uint64_t words, std::uint64_t groups) {
  auto bits = claim.bits;
  auto size = claim.group_size;
  const auto own = std::ranges::find(claim.modules, module, &QuantizationClaim::Module::name);
  if (own != claim.modules.end()) {
    if (own->bits) bits = own->bits;
    if (own->group_size) size = own->group_size;
  }
  std::uint64_t found = 0;
  for (const std::uint64_t each : {32u, 64u, 128u}) {
    const std::uint64_t columns = groups * each;
    const unsigned its = bits_of(words, columns);
    if (its == 0 || (size && *size != each) || (bits && *bits != its)) continue;
    if (found != 0) return 0;
    found = columns;
  }
  return found;
}

void decode_affine(const TensorTable& table, const std::string& module, QuantizedTensor& made) {
  const Shape& words = table[made.data].shape;
  const Shape& scales = table[made.scales[0]].shape;
  auto extents = words.extents();
  extents.back() =
      scales.rank() == words.rank()
          ? affine_columns(table.claim(), module, extents.back(), scales.extents().back())
          : 0;
  if (extents.back() == 0) {
    refuse(made, "plan.encoding",
           "has codes whose size neither config.json nor the shapes determine",
           {table[made.data].name, table[made.scales[0]].name},
           fmt::format("{} and {}", words.text(), scales.text()),
           "\"quantization\" with \"bits\" and \"group_size\"");
    return;
  }
  set_decoding(table, made, "mlx-affine",
               {"mlx_affine",
                {made.data, made.scales[0], made.scales[1]},
                Shape(std::move(extents)),
                Dtype::bf16});
}

void decode_mode(const TensorTable& table, QuantizedTensor& made) {
  const Shape& scales = table[made.scales[0]].shape;
  auto extents = table[made.data].shape.extents();
  const std::uint64_t words = extents.back();
  for (const Mode& mode : modes) {
    if (scales.rank() == 0 || words * mode.per_word != scales.extents().back() * mode.per_scale) {
      continue;
    }
    extents.back() = words * mode.per_word;
    set_decoding(
        table, made, mode.encoding,
        {mode.kernel, {made.data, made.scales[0]}, Shape(std::move(extents)), Dtype::bf16});
    return;
  }
  refuse(made, "q.scale_shape", "has a number of scales that fits no mode of MLX",
         {table[made.scales[0]].name}, scales.text());
}

std::optional<QuantizedTensor> recognise(const TensorTable& table, std::uint32_t tensor) {
  const TensorInfo& data = table[tensor];
  if (!is_dtype(data, {Dtype::u32}) || !data.name.ends_with(".weight")) return std::nullopt;
  const std::string stem = without_suffix(data.name, "weight");
  const auto scales = table.find(stem + "scales");
  if (scales == none || data.shape.rank() < 2) return std::nullopt;
  const auto biases = table.find(stem + "biases");
  QuantizedTensor made = quantized_tensor(data.name, tensor, {scales, biases});
  if (biases != none) {
    decode_affine(table, stem.substr(0, stem.size() - 1), made);
  } else if (is_dtype(table[scales], {Dtype::u8})) {
    decode_mode(table, made);
  } else {
    refuse(made, "q.scale_missing", "lacks components", {stem + "biases"});
  }
  return made;
}

}  // namespace

constexpr std::array<std::string_view, 4> encodings = {"mlx-affine", "mxfp4-mlx", "nvfp4-mlx",
                                                       "mxfp8-mlx"};

extern const Family mlx_family = {
    .kernels = kernels, .recognise = recognise, .encodings = encodings};

}  // namespace loadstone
