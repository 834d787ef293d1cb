// Recognises NF4, FP4 and LLM.int8 weights. See docs/formats/bitsandbytes.md
#include <algorithm>
#include <array>
#include <utility>

#include "base/ceil_div.h"
#include "base/named.h"
#include "base/text.h"
#include "codec/bnb/state.h"
#include "codec/bnb/weights.h"
#include "codec/families.h"
#include "kernels/bnb_parts.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

constexpr std::uint32_t none = TensorTable::none;
constexpr std::string_view state_infix = ".quant_state.bitsandbytes__";

// ---- LLM.int8: "P.weight" with "P.SCB"

// Rejects the tiled layout for old GPUs, which bitsandbytes itself no longer reads.
void check_weight_format(const TensorTable& table, QuantizedTensor& made, std::uint32_t format) {
  constexpr std::uint64_t bytes_max = 8;  // the size of an I64
  std::string text(1, '\1');
  if (table[format].byte_count() <= bytes_max) text = table.bytes_of(format);
  if (std::ranges::all_of(text, [](char byte) { return byte == 0; })) return;
  refuse(made, "q.weight_format", "is stored in the tile layout of an old GPU",
         {table[format].name}, std::to_string(static_cast<unsigned char>(text.front())), "0, rows");
}

std::optional<QuantizedTensor> recognise_rows(const TensorTable& table, std::uint32_t tensor) {
  const TensorInfo& data = table[tensor];
  if (!data.name.ends_with("weight")) return std::nullopt;
  const auto scale = table.find(without_suffix(data.name, "weight") + "SCB");
  if (scale == none) return std::nullopt;
  QuantizedTensor made = quantized_tensor(data.name, tensor, {scale});
  set_decoding(table, made, "int8", {"bnb_int8", {tensor, scale}, data.shape, Dtype::f16});
  const auto format = table.find(without_suffix(data.name, "weight") + "weight_format");
  if (format == none) return made;
  made.unneeded.push_back(format);
  try {
    check_weight_format(table, made, format);
  } catch (const Error& error) {
    refuse(made, error, table[format].name);
  }
  return made;
}

// ---- NF4 and FP4: packed bytes, and a state (JSON) that describes them

// bitsandbytes packs 4-bit codes as a column of bytes, whatever the shape of the weight.
bool is_packed(const TensorInfo& tensor) {
  return tensor.shape.rank() == 2 && tensor.shape[1] == 1 && tensor.shape[0] > 1 &&
         tensor.name.ends_with(".weight");
}

// Returns the possible names of a weight's state: one for each 4-bit encoding.
std::vector<std::string> state_names(const std::string& weight) {
  auto names = names_of<BnbEncoding>([](BnbEncoding each) { return bnb4_code(each).has_value(); });
  for (std::string& each : names) each = weight + std::string(state_infix) + each;
  return names;
}

// Rejects packed bytes without a state, because they may be NF4 or FP4.
std::optional<QuantizedTensor> recognise_without_state(const TensorTable& table,
                                                       std::uint32_t tensor) {
  const std::string& name = table[tensor].name;
  std::vector<std::string> wanted = state_names(name);
  for (const std::string& each : wanted) {
    if (table.find(each) != none) return std::nullopt;
  }
  QuantizedTensor made = quantized_tensor(name, tensor, {});
  refuse(made, "q.scale_missing", "is packed, but lacks the quant_state tensor that describes it",
         std::move(wanted));
  return made;
}

void check_tables(const TensorTable& table, const QuantizedTensor& made, const std::string& type,
                  std::uint32_t nested_map) {
  if (const auto map = table.find(made.name + ".quant_map"); map != none) {
    const auto encoding = from_name<BnbEncoding>(type);
    const auto code = encoding ? bnb4_code(*encoding) : std::nullopt;
    if (code)
      check_bnb_map(table[map], table.bytes_of(map), *code);  // only if a kernel decodes the weight
  }
  if (nested_map != none) check_bnb_nested_map(table[nested_map], table.bytes_of(nested_map));
}

// The kernel derives the block size from the number of scales. Checks that the state has this size.
bool has_sizes(const TensorTable& table, QuantizedTensor& made, const Decoding& decoding,
               std::uint64_t block_size) {
  const TensorInfo& data = table[decoding.sources[0]];
  const TensorInfo& absmax = table[decoding.sources[1]];
  const std::uint64_t elements = decoding.shape.numel().value_or(0);
  if (data.byte_count() != ceil_div(elements, 2)) {
    refuse(made, "q.shape", "has a number of bytes that does not fit its shape", {data.name},
           human_bytes(data.byte_count()), decoding.shape.text());
    return false;
  }
  if (absmax.shape.numel() != ceil_div(elements, block_size)) {
    refuse(made, "q.scale_shape", "has a number of scales that does not fit its shape",
           {absmax.name}, absmax.shape.text(), std::to_string(ceil_div(elements, block_size)));
    return false;
  }
  return true;
}

void decode_by_state(const TensorTable& table, QuantizedTensor& made) {
  const TensorInfo& tensor = table[made.states.front()];
  const std::string type = tensor.name.substr(made.name.size() + state_infix.size());
  const BnbState state = parse_bnb_state(table.bytes_of(made.states.front()), tensor.name);
  std::vector<std::string> missing;
  Decoding decoding = {"bnb_" + type, {}, state.shape, state.dtype};
  const auto take = [&](const char* suffix) {
    const auto index = table.find(made.name + suffix);
    if (index == none) missing.push_back(made.name + suffix);
    decoding.sources.push_back(index);
  };
  take("");
  take(".absmax");
  if (state.nested_offset) {
    take(".nested_absmax");
    take(".nested_quant_map");
    decoding.offset = *state.nested_offset;
  }
  if (!missing.empty()) {
    refuse(made, "q.scale_missing", "lacks components", std::move(missing));
    return;
  }
  if (!has_sizes(table, made, decoding, state.block_size)) return;
  check_tables(table, made, type, state.nested_offset ? decoding.sources[3] : none);
  set_decoding(table, made, type, std::move(decoding));
  made.unneeded = made.states;
  if (const auto map = table.find(made.name + ".quant_map"); map != none) {
    made.unneeded.push_back(map);
  }
}

// Recognises a weight by its state. If it has two states, the first one in the file counts.
std::optional<QuantizedTensor> recognise_state(const TensorTable& table, std::uint32_t tensor) {
  const std::string& name = table[tensor].name;
  const auto at = name.find(state_infix);
  const std::string value = name.substr(0, at);
  QuantizedTensor made =
      quantized_tensor(value, table.find(value),
                       {table.find(value + ".absmax"), table.find(value + ".nested_absmax")});
  made.states.push_back(tensor);
  for (const std::string& each : state_names(value)) {
    const auto other = table.find(each);
    if (other == none || other == tensor) continue;
    if (other < tensor) return std::nullopt;
    made.states.push_back(other);
  }
  if (made.states.size() > 1) {
    refuse(made, "q.quant_state", "has two quant_state tensors, but only one can be right",
           {name, table[made.states[1]].name});
    return made;
  }
  try {
    decode_by_state(table, made);
  } catch (const Error& error) {
    refuse(made, error, name);
  }
  return made;
}

std::optional<QuantizedTensor> recognise(const TensorTable& table, std::uint32_t tensor) {
  const TensorInfo& data = table[tensor];
  if (is_dtype(data, {Dtype::i8})) return recognise_rows(table, tensor);
  if (!is_dtype(data, {Dtype::u8})) return std::nullopt;
  if (data.name.find(state_infix) != std::string::npos) return recognise_state(table, tensor);
  const bool has_scale = table.find_any(data.name, {"_scale", "_weight_scale"}) != none;
  if (is_packed(data) && !has_scale) return recognise_without_state(table, tensor);
  return std::nullopt;
}

constexpr std::array<std::string_view, 2> tables = {".quant_map", ".nested_quant_map"};

}  // namespace

constexpr std::array<std::string_view, 3> encodings = {"nf4", "fp4", "int8"};

extern const Family bnb_family = {.kernels = bnb_kernels(),
                                  .recognise = recognise,
                                  .encodings = encodings,
                                  .tables = tables,
                                  .written = bnb_written(),
                                  .method = "bitsandbytes",
                                  .stores_conv1d_transposed = true};

}  // namespace loadstone
