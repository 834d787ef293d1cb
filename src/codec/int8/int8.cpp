// Recognises and decodes 8-bit integers with scales of rows or blocks. See docs/formats/modelopt.md
#include <array>
#include <utility>

#include "base/ceil_div.h"
#include "codec/families.h"
#include "codec/scaled/scaled.h"
#include "codec/unknown/foreign_scale.h"

namespace loadstone {

namespace {

constexpr std::uint32_t none = TensorTable::none;

// ---- Decoding: I8 [..., rows, columns], scales, and I8 zero points in the shape of the scales

enum class Cut : std::uint8_t { evenly, by_rows, by_128 };

std::optional<Problem> set_blocks(const DecodeRequest& request, Cut cut, scaled::Layout& form) {
  if (cut == Cut::evenly) return scaled::cut_evenly(request, form);
  return cut == Cut::by_rows ? scaled::cut_by(request, 1, 0, form)
                             : scaled::cut_by(request, 128, 128, form);
}

template <Cut cut>
std::optional<Problem> prepare(const DecodeRequest& request, PreparedDecoder& made) {
  scaled::Layout form = {.weight = Dtype::i8};
  const std::size_t parts = request.parts.size() == 3 ? 3 : 2;
  if (auto wrong = scaled::check_codes(request, parts, {Dtype::i8}, "I8")) return wrong;
  if (auto wrong = scaled::set_scale_dtype(request.parts[1], form)) return wrong;
  auto wrong = set_blocks(request, cut, form);
  if (!wrong && parts == 3) wrong = scaled::set_zeros(request, form);
  if (wrong) return wrong;
  scaled::finish(form, made);
  return std::nullopt;
}

constexpr ErrorBound error = error_bound::of_integers(127, std::byte{0x7f}, Dtype::i8);

constexpr std::array kernels = {
    DecodeKernel{.name = "int8_rows", .prepare = prepare<Cut::by_rows>, .error = &error},
    DecodeKernel{.name = "int8_block", .prepare = prepare<Cut::evenly>, .error = &error},
    DecodeKernel{.name = "int8_block_128", .prepare = prepare<Cut::by_128>, .error = &error},
};

// ---- recognising

// Chooses the kernel by the shape of the scales.
void decode(const TensorTable& table, QuantizedTensor& made, Decoding decoding) {
  decoding.sources.insert(decoding.sources.begin(), made.data);
  const Shape& scales = table[decoding.sources[1]].shape;
  const std::size_t rank = decoding.shape.rank();
  const bool is_grid = rank > 1 && scales.rank() == rank;
  const std::uint64_t rows = rank > 1 ? decoding.shape[rank - 2] : 0;
  const bool has_one = scales.numel() == 1u && (rank < 2 || rows > 1);
  const bool has_rows = is_grid && scales[rank - 2] == rows && scales[rank - 1] == 1;
  if (is_grid && !has_rows && !(has_one && !table.claim().block)) {
    constexpr scaled::BlockCodec blocks = {"int8-group", "int8_block", "int8_block_128"};
    return scaled::decode_blocks(table, made, blocks, std::move(decoding));
  }
  decoding.kernel = has_one ? "int8_block" : "int8_rows";
  set_decoding(table, made, has_one ? "int8-tensor" : "int8-channel", std::move(decoding));
}

std::optional<QuantizedTensor> recognise(const TensorTable& table, std::uint32_t tensor) {
  const TensorInfo& data = table[tensor];
  if (!is_dtype(data, {Dtype::i8})) return std::nullopt;
  const auto scale = table.find_any(data.name, {"_scale", "_weight_scale"});
  if (scale == none) return std::nullopt;
  const auto zero = table.find(data.name + "_zero_point");
  QuantizedTensor made = quantized_tensor(data.name, tensor, {scale, zero});
  made.has_zero_points = zero != none;
  if (const auto order = table.find(data.name + "_g_idx"); order != none) {
    made.states.push_back(order);
    refuse_layout(table, made);
    return made;
  }
  if (zero != none && table.claim().is_symmetric == true) {
    refuse(made, "plan.config_mismatch",
           "has zero points, but the config declares symmetric quantization", {table[zero].name},
           "zero points", "symmetric: true");
    return made;
  }
  if (zero == none && table.claim().is_symmetric == false) {
    refuse(made, "q.scale_missing", "lacks components", {data.name + "_zero_point"});
    return made;
  }
  decode(table, made, {{}, made.scales, data.shape, Dtype::bf16});
  return made;
}

// ---- writing

std::optional<Problem> write_rows(const Quantization& quantization, const Shape& shape,
                                  QuantizedLayout& form) {
  if (auto problem = scaled::begin_matrices(quantization, shape, form)) return problem;
  form.window_elements = form.columns;
  form.parts = {{"data", shape, Dtype::i8},
                {"scale", scaled::with_last(shape, 1, {1}), scaled::scale_dtype(form)}};
  return std::nullopt;
}

template <ComponentShape scale_shape>
constexpr std::array names = {ComponentName{"data", "weight"},
                              ComponentName{"scale", "weight_scale", scale_shape}};

constexpr std::array written = {WrittenEncoding{
    .name = "int8-channel",
    .kind = QuantizeKind::int8_channel,
    .bits = 8,
    .code_type = "int",
    .kernel = "int8_rows",
    .prepare = write_rows,
    .unified_names = names<ComponentShape::flat>,
    .compressed_names = names<ComponentShape::same>,
    .unified = {"W8A16", Described::weights},
    .compressed = {"int-quantized", "channel", "token"},
    .typical_error = 0.0079F,
}};

}  // namespace

constexpr std::array<std::string_view, 3> encodings = {"int8-channel", "int8-tensor", "int8-group"};

extern const Family int8_family = {.kernels = kernels,
                                   .recognise = recognise,
                                   .reads_all = true,
                                   .encodings = encodings,
                                   .written = written};

}  // namespace loadstone
