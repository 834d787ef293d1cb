#include "codec/unknown/foreign_scale.h"

#include <algorithm>
#include <array>

namespace loadstone {

namespace {

constexpr std::uint32_t none = TensorTable::none;

// Of a weight "P.weight": Comfy's, Mistral's, and that of DeepSeek's own inference code. They start
// where "weight" does.
constexpr std::array<std::string_view, 4> scale_names = {"scale_weight", "qscale_weight", "scale",
                                                         "scale_inv"};

// A module has a few tensors; what begins like one and has more is no module.
constexpr std::size_t siblings_max = 64;

// A float of the same module whose name speaks of a scale: whoever wrote it means this weight.
std::uint32_t sibling_scale(const TensorTable& table, const std::string& stem) {
  for (const std::uint32_t index : table.beginning_with(stem, siblings_max)) {
    const TensorInfo& tensor = table[index];
    const std::string_view leaf = std::string_view(tensor.name).substr(stem.size());
    const bool is_own = leaf.find('.') == std::string_view::npos || leaf.starts_with("weight.") ||
                        leaf.starts_with("quantizer.");
    const bool is_scale =
        leaf.find("scale") != std::string_view::npos || leaf == "s" || leaf == "weight_s";
    if (is_own && is_scale &&
        is_dtype(tensor, {Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::f8_e8m0})) {
      return index;
    }
  }
  return none;
}

std::uint32_t foreign_scale(const TensorTable& table, const std::string& name) {
  const auto beside = table.find_any(name, {".scale", "_scales"});
  if (beside != none || !name.ends_with("weight")) return beside;
  const std::string stem = without_suffix(name, "weight");
  for (const std::string_view leaf : scale_names) {
    if (const auto index = table.find(stem + std::string(leaf)); index != none) return index;
  }
  return sibling_scale(table, stem);
}

// The scale of scales, of a weight whose numbers are not computed with it.
std::uint32_t second_scale(const TensorTable& table, const QuantizedTensor& quantized) {
  const std::uint32_t second = table.find(quantized.name + "_scale_2");
  const auto known = quantized.companions();
  return std::ranges::count(known, second) == 0 ? second : none;
}

}  // namespace

void refuse_layout(const TensorTable& table, QuantizedTensor& quantized) {
  std::vector<std::string> sources = {table[quantized.data].name};
  for (const std::uint32_t companion : quantized.companions()) {
    sources.push_back(table[companion].name);
  }
  refuse(quantized, "plan.encoding", "is quantized in a layout that this version does not decode",
         std::move(sources));
}

std::optional<QuantizedTensor> with_foreign_scale(const TensorTable& table, std::uint32_t data) {
  const std::string& name = table[data].name;
  const auto scale = foreign_scale(table, name);
  if (scale == none) return std::nullopt;
  QuantizedTensor made = quantized_tensor(name, data, {scale});
  refuse_layout(table, made);
  return made;
}

void refuse_foreign_companions(const TensorTable& table, QuantizedTensor& quantized,
                               bool reads_all) {
  if (quantized.data == none) return;
  const std::string& name = quantized.name;
  std::uint32_t other = reads_all ? none : table.find_any(name, {"_zero_point", "_g_idx"});
  if (other == none && name.ends_with("weight")) {
    const std::string module = without_suffix(name, "weight");
    other = table.find_any(module, {"pre_quant_scale"});
    if (other == none) other = second_scale(table, quantized);
    // ComfyUI's order of the scales of 4 bits is its own.
    const bool is_packed = is_dtype(table[quantized.data], {Dtype::u8});
    if (other == none && is_packed) other = table.find_any(module, {"comfy_quant"});
  }
  if (other == none) return;
  quantized.states.push_back(other);
  refuse_layout(table, quantized);
}

}  // namespace loadstone
