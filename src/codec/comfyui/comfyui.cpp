// Recognises and decodes the layouts of ComfyUI. See docs/formats/comfyui.md
#include "codec/comfyui/comfyui.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "base/json_dom.h"
#include "codec/families.h"
#include "codec/scaled/scaled.h"
#include "kernels/modelopt/scales.h"

namespace loadstone {

namespace {

constexpr std::uint32_t none = TensorTable::none;

// ---- Decoding: block scales in tiles, see Layout::is_tiled

using scaled::Codes;
using scaled::Layout;

std::optional<Problem> prepare_nvfp4(const DecodeRequest& request, PreparedDecoder& made) {
  Layout form = {.codes = Codes::fp4_high_first};
  if (auto wrong = scaled::check_codes(request, 3, {Dtype::u8}, "U8", 2)) return wrong;
  if (auto wrong = scaled::set_scale_dtype(request.parts[1], {Dtype::f8_e4m3}, "F8_E4M3", form)) {
    return wrong;
  }
  if (auto wrong = scaled::cut_in_tiles(request, scaled::nvfp4_block, form)) return wrong;
  if (auto wrong = scaled::set_global(request, scaled::Global::factor, form)) return wrong;
  scaled::finish(form, made);
  return std::nullopt;
}

std::optional<Problem> prepare_mxfp8(const DecodeRequest& request, PreparedDecoder& made) {
  Layout form;
  if (auto wrong = scaled::check_codes(request, 2, {Dtype::f8_e4m3}, "F8_E4M3")) return wrong;
  if (auto wrong = scaled::set_scale_dtype(request.parts[1], {Dtype::u8, Dtype::f8_e8m0},
                                           "U8 or F8_E8M0", form)) {
    return wrong;
  }
  if (auto wrong = scaled::cut_in_tiles(request, simd::mx_block, form)) return wrong;
  scaled::finish(form, made);
  return std::nullopt;
}

constexpr std::array kernels = {
    DecodeKernel{.name = "comfy_nvfp4", .prepare = prepare_nvfp4, .has_zero_scales = true},
    DecodeKernel{.name = "comfy_mxfp8", .prepare = prepare_mxfp8},
};

// ---- recognising

// Returns true if a tensor "scaled_fp8" marks the model, or a parent of the tensor, as scaled.
bool is_in_scaled_model(const TensorTable& table, const std::string& name) {
  if (table.find("scaled_fp8") != none) return true;
  for (std::size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.', dot + 1)) {
    if (table.find(name.substr(0, dot + 1) + "scaled_fp8") != none) return true;
  }
  return false;
}

// Recognises FP8 with the scale "P.scale_weight", which ComfyUI wrote before it had markers.
std::optional<QuantizedTensor> recognise(const TensorTable& table, std::uint32_t tensor) {
  const TensorInfo& data = table[tensor];
  if (!is_fp8(data) || !data.name.ends_with(".weight")) return std::nullopt;
  const std::string scale_name = without_suffix(data.name, "weight") + "scale_weight";
  const auto scale = table.find(scale_name);
  if (scale == none) {
    const bool has_other = table.find_any(data.name, {"_scale", "_scale_inv"}) != none;
    if (has_other || !is_in_scaled_model(table, data.name)) return std::nullopt;
    QuantizedTensor lacking = quantized_tensor(data.name, tensor, {});
    refuse(lacking, "q.scale_missing", "lacks components", {scale_name});
    return lacking;
  }
  QuantizedTensor made = quantized_tensor(data.name, tensor, {scale});
  if (table[scale].shape.numel() != 1u) {
    refuse(made, "q.scale_shape", "has more than one scale", {table[scale].name},
           table[scale].shape.text(), "one scale");
    return made;
  }
  set_decoding(table, made, "fp8", {"fp8_block", {tensor, scale}, data.shape, Dtype::bf16});
  return made;
}

// ---- markers

// Returns the markers of the header's metadata by module; an empty map if the JSON is invalid.
std::map<std::string, std::string, std::less<>> markers_in_metadata(const TensorTable& table) {
  std::map<std::string, std::string, std::less<>> markers;
  const std::string_view text = table.metadata(comfyui::layers_metadata_key);
  dom::parser parser;
  dom::object layers;
  if (text.empty() || parsed_json(parser, text)["layers"].get(layers) != simdjson::SUCCESS) {
    return markers;
  }
  for (const auto field : layers) {
    markers.insert_or_assign(std::string(field.key), simdjson::minify(field.value));
  }
  return markers;
}

// Returns the marker's format; nullopt if the marker requires more than codes and scales. Sets
// `format` in both cases.
std::optional<std::string> plain_format(std::string_view marker, std::string& format) {
  dom::parser parser;
  dom::object object;
  if (parsed_json(parser, marker).get(object) != simdjson::SUCCESS) return std::nullopt;
  bool has_more = false;
  for (const auto field : object) {
    std::string_view text;
    bool flag = false;
    if (field.key == "format" && field.value.get(text) == simdjson::SUCCESS) {
      format = text;
    } else if (field.key != "full_precision_matrix_mult") {
      has_more |= field.value.get(flag) != simdjson::SUCCESS || flag;
    }
  }
  return has_more || format.empty() ? std::nullopt : std::optional(format);
}

struct Format {
  std::string_view name;
  Dtype codes;
  std::string_view encoding{};  // of tiled scales; empty: names and shapes determine the encoding
  const char* kernel = nullptr;
};
constexpr std::array formats = {
    Format{"float8_e4m3fn", Dtype::f8_e4m3},
    Format{"float8_e5m2", Dtype::f8_e5m2},
    Format{"int8_tensorwise", Dtype::i8},
    Format{"nvfp4", Dtype::u8, "nvfp4-comfyui", "comfy_nvfp4"},
    Format{"mxfp8", Dtype::f8_e4m3, "mxfp8-comfyui", "comfy_mxfp8"},
};

// Sets the decoding for tiled scales.
void decode_tiled(const TensorTable& table, QuantizedTensor& made, const Format& format) {
  const bool is_nvfp4 = format.codes == Dtype::u8;
  auto extents = table[made.data].shape.extents();
  if (is_nvfp4 && !extents.empty()) extents.back() *= 2;  // on overflow the kernel rejects it
  std::vector<std::uint32_t> sources = {made.data};
  made.scales.clear();
  for (const std::string_view suffix : {"_scale", "_scale_2"}) {
    const std::string name = made.name + std::string(suffix);
    const auto scale = table.find(name);
    if (scale == none) {
      refuse(made, "q.scale_missing", "lacks components", {name});
      return;
    }
    sources.push_back(scale);
    made.scales.push_back(scale);
    if (!is_nvfp4) break;
  }
  made.defect = {};
  set_decoding(table, made, format.encoding,
               {format.kernel, std::move(sources), Shape(std::move(extents)), Dtype::bf16});
}

// Returns true if the marker's format fits the tensor, whose decoding may change. A tensor that
// already has a defect keeps it.
bool is_applied(const TensorTable& table, const std::string& format, QuantizedTensor& made) {
  constexpr std::array<std::string_view, 4> scaled = {"fp8", "fp8-channel", "int8-tensor",
                                                      "int8-channel"};
  const auto known = std::ranges::find(formats, format, &Format::name);
  if (known == formats.end() || !is_dtype(table[made.data], {known->codes})) return false;
  if (known->kernel == nullptr) {
    return !made.is_readable() || std::ranges::count(scaled, made.encoding) > 0;
  }
  decode_tiled(table, made, *known);
  return true;
}

}  // namespace

void comfyui::apply_markers(const TensorTable& table, std::vector<QuantizedTensor>& found) {
  const auto markers = markers_in_metadata(table);
  for (QuantizedTensor& each : found) {
    constexpr std::string_view weight = ".weight";
    if (each.data == none || !each.name.ends_with(weight)) continue;
    const std::string module = without_suffix(each.name, weight);
    const std::uint32_t tensor = table.find(module + "." + std::string(marker_leaf));
    const auto known = markers.find(module);
    if (known == markers.end() && tensor == none) continue;
    std::string format;
    std::vector<std::string> sources = {table[each.data].name};
    if (tensor != none) sources.push_back(table[tensor].name);
    try {
      if (known == markers.end()) each.decided_by.push_back(tensor);
      const std::string text = known != markers.end() ? known->second : table.bytes_of(tensor);
      const auto plain = plain_format(text, format);
      if (plain && is_applied(table, *plain, each)) continue;
    } catch (const Error& error) {
      refuse(each, error, sources.back());
      continue;
    }
    refuse(each, "plan.encoding",
           "is marked with a layout that this version of loadstone does not decode",
           std::move(sources), std::move(format));
  }
}

constexpr std::array<std::string_view, 2> encodings = {"nvfp4-comfyui", "mxfp8-comfyui"};

extern const Family comfyui_family = {
    .kernels = kernels, .recognise = recognise, .encodings = encodings};

}  // namespace loadstone
