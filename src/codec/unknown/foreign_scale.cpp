#include "codec/unknown/foreign_scale.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "codec/companions.h"

namespace loadstone {

namespace {

constexpr std::uint32_t none = TensorTable::none;

// Of a weight "P.weight": Comfy's, Mistral's, and that of DeepSeek's own inference code. They start
// where "weight" does.
constexpr std::array<std::string_view, 4> scale_names = {"scale_weight", "qscale_weight", "scale",
                                                         "scale_inv"};

// A module has a few tensors; what begins like one and has more is no module.
constexpr std::size_t siblings_max = 64;

bool has_part(std::string_view text, std::initializer_list<std::string_view> parts) {
  return std::ranges::any_of(
      parts, [&](std::string_view part) { return text.find(part) != std::string_view::npos; });
}

bool is_scale_leaf(std::string_view leaf) {
  return has_part(leaf, {"scale"}) || leaf == "s" || leaf == "weight_s";
}

// Returns whether a tensor is of the module itself; `leaf`: its name after the module's.
bool is_of_module(std::string_view leaf) {
  return leaf.find('.') == std::string_view::npos || leaf.starts_with("weight.") ||
         leaf.starts_with("quantizer.");
}

// Tensors of the same module whose names speak of a scale or of what is added to it, scales first:
// whoever wrote them means these codes.
std::vector<std::uint32_t> siblings(const TensorTable& table, const std::string& stem) {
  std::vector<std::uint32_t> scales;
  std::vector<std::uint32_t> others;
  for (const std::uint32_t index : table.beginning_with(stem, siblings_max)) {
    const TensorInfo& tensor = table[index];
    const std::string_view leaf = std::string_view(tensor.name).substr(stem.size());
    const bool is_scale = is_scale_leaf(leaf);
    const bool is_meant =
        is_scale || has_part(leaf, {"zero", "codebook", "absmax"}) || leaf == "biases";
    const bool is_float = is_dtype(tensor, {Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::f8_e8m0}) ||
                          (leaf == "scales" && is_dtype(tensor, {Dtype::u8}));
    if (!is_of_module(leaf) || !is_meant || !is_float || is_companion_name(tensor.name)) continue;
    (is_scale ? scales : others).push_back(index);
  }
  scales.insert(scales.end(), others.begin(), others.end());
  return scales;
}

// The first scale among them, or none.
std::uint32_t sibling_scale(const TensorTable& table, const std::string& stem) {
  const auto found = siblings(table, stem);
  if (found.empty()) return none;
  const std::string_view name = table[found.front()].name;
  return is_scale_leaf(name.substr(stem.size())) ? found.front() : none;
}

// Adds the rest of the module: it is cast as little as the codes.
void add_siblings(const TensorTable& table, const std::string& stem, QuantizedTensor& made) {
  for (const std::uint32_t index : siblings(table, stem)) {
    if (std::ranges::count(made.scales, index) == 0) made.states.push_back(index);
  }
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

std::string_view leaf_of(std::string_view name) { return name.substr(name.rfind('.') + 1); }

// "weight" of "_weight_scale", "weight:scale" and "weight_scale_inv"; nothing of "scale".
std::string_view scaled_by(std::string_view leaf) {
  constexpr std::string_view separators = "_:-";
  leaf = leaf.substr(0, leaf.find("scale"));
  leaf.remove_prefix(std::min(leaf.find_first_not_of(separators), leaf.size()));
  return leaf.substr(0, leaf.find_last_not_of(separators) + 1);
}

// An embedding's indices and masks are integers too: only a name tells their codes apart.
bool may_be_codes_of(const TensorInfo& tensor, std::string_view scaled) {
  const std::string_view leaf = leaf_of(tensor.name);
  if (has_part(leaf, {"scale", "zero"}) || is_companion_name(tensor.name)) return false;
  const bool has_name =
      leaf.find(scaled) != std::string_view::npos || scaled.find(leaf) != std::string_view::npos;
  if (is_fp8(tensor)) return has_name;
  const bool is_integer = is_dtype(tensor, {Dtype::i8, Dtype::u8, Dtype::i32, Dtype::u32});
  return is_integer && tensor.shape.rank() >= 2 && has_name && !scaled.empty();
}

bool is_factor_leaf(std::string_view leaf) {
  constexpr std::array<std::string_view, 4> others = {"zp", "weight_zp", "weight_min", "min"};
  return has_part(leaf, {"scale", "zero", "offset"}) || std::ranges::count(others, leaf) > 0;
}

// Returns whether the name goes with another tensor of the same module: "in_proj_weight" has the
// "in_proj_weight_scale" next to "weight".
bool is_of_another(const TensorTable& table, const std::string& name,
                   const QuantizedTensor& quantized) {
  const auto known = quantized.companions();
  for (auto end = name.rfind('_'); end != 0 && end != std::string::npos;
       end = name.rfind('_', end - 1)) {
    const std::string stem = name.substr(0, end);
    const auto owner = table.find(stem);
    if (stem == quantized.name || owner == quantized.data) return false;
    if (owner != none && std::ranges::count(known, owner) == 0) return true;
  }
  return false;
}

// A scale, a zero point or an offset next to codes that their codec does not read: "weight_offset",
// "weight_scale_second". Those of activations and caches are in the companions' table.
std::uint32_t factor_beside(const TensorTable& table, const QuantizedTensor& quantized) {
  if (!quantized.is_readable()) return none;
  const std::string& name = quantized.name;
  const std::string module = name.ends_with("weight") ? without_suffix(name, "weight") : name + "_";
  const auto known = quantized.companions();
  for (const std::uint32_t index : table.beginning_with(module, siblings_max)) {
    const std::string& other = table[index].name;
    const std::string_view leaf = std::string_view(other).substr(module.size());
    const bool is_known = index == quantized.data || std::ranges::count(known, index) > 0;
    if (is_known || !is_of_module(leaf) || !is_factor_leaf(leaf)) continue;
    if (!is_companion_name(other) && !is_of_another(table, other, quantized)) return index;
  }
  return none;
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
  if (name.ends_with("weight")) add_siblings(table, without_suffix(name, "weight"), made);
  refuse_layout(table, made);
  return made;
}

std::optional<QuantizedTensor> unknown_codes(const TensorTable& table, std::uint32_t data) {
  const TensorInfo& codes = table[data];
  const std::string stem = codes.name.substr(0, codes.name.rfind('.') + 1);
  const std::string_view leaf = std::string_view(codes.name).substr(stem.size());
  const bool is_named = leaf == "weight" || leaf == "W_q" || leaf == "codes";
  if (!is_named || is_fp8(codes) || codes.shape.rank() < 2) return std::nullopt;
  const auto scale = sibling_scale(table, stem);
  if (scale == none) return std::nullopt;
  QuantizedTensor made = quantized_tensor(codes.name, data, {scale});
  add_siblings(table, stem, made);
  refuse_layout(table, made);
  return made;
}

std::vector<QuantizedTensor> codes_of_unused_scales(const TensorTable& table,
                                                    const std::vector<bool>& is_used) {
  const auto is_free = [&](std::uint32_t i) { return is_used.empty() || !is_used[i]; };
  std::map<std::uint32_t, QuantizedTensor> found;
  for (std::uint32_t i = 0; i < table.tensors().size(); ++i) {
    const std::string& name = table[i].name;
    const std::string_view leaf = leaf_of(name);
    const bool is_float = is_dtype(table[i], {Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::f8_e8m0});
    if (!is_float || !is_free(i) || !has_part(leaf, {"scale"}) || is_companion_name(name)) continue;
    const std::string_view scaled = scaled_by(leaf);
    const std::string stem = name.substr(0, name.size() - leaf.size());
    const std::string near = name.substr(0, stem.size() + leaf.find("scale"));
    const auto add = [&](std::uint32_t data) {
      const bool is_in_module = table[data].name.rfind('.') + 1 == stem.size();
      if (!is_in_module || !is_free(data) || !may_be_codes_of(table[data], scaled)) return;
      auto& made =
          found.try_emplace(data, quantized_tensor(table[data].name, data, {})).first->second;
      if (std::ranges::count(made.scales, i) == 0) made.scales.push_back(i);
    };
    std::ranges::for_each(table.beginning_with(stem, siblings_max), add);
    std::ranges::for_each(table.beginning_with(near, siblings_max), add);
  }
  std::vector<QuantizedTensor> all;
  for (auto& [data, made] : found) {
    refuse_layout(table, made);
    all.push_back(std::move(made));
  }
  return all;
}

std::vector<std::uint32_t> floats_beside(const TensorTable& table, const QuantizedTensor& codes) {
  std::vector<std::uint32_t> found;
  if (codes.data == none) return found;
  const std::string& name = table[codes.data].name;
  std::string module = name.substr(0, name.rfind('.') + 1);
  if (module.ends_with("._data."))
    module = without_suffix(module, "_data.");  // Quanto's packed codes
  if (module.ends_with(".weight.")) module = without_suffix(module, "weight.");
  if (module.empty()) return found;
  for (const std::uint32_t index : table.beginning_with(module, siblings_max)) {
    const std::string_view leaf = std::string_view(table[index].name).substr(module.size());
    const bool is_float = is_dtype(table[index], {Dtype::f64, Dtype::f32, Dtype::f16, Dtype::bf16});
    if (is_float && is_of_module(leaf) && leaf != "bias") found.push_back(index);
  }
  return found;
}

void refuse_foreign_companions(const TensorTable& table, QuantizedTensor& quantized,
                               bool reads_all) {
  if (quantized.data == none) return;
  const std::string& name = quantized.name;
  std::uint32_t other = reads_all ? none : table.find_any(name, {"_zero_point", "_g_idx"});
  if (other == none && name.ends_with("weight")) {
    const std::string module = without_suffix(name, "weight");
    // Smoothing multiplies inputs; SVDQuant adds a product.
    other = table.find_any(module, {"pre_quant_scale", "input_quantizer._pre_quant_scale",
                                    "input_quantizer.pre_quant_scale", "svdquant_lora_a",
                                    "weight_quantizer._svdquant_lora_a"});
  } else if (other == none) {  // stacks of experts: "experts.gate_up_proj"
    other = table.find_any(name, {"_pre_quant_scale", "_input_quantizer._pre_quant_scale"});
  }
  if (other == none) other = factor_beside(table, quantized);
  if (other == none) return;
  quantized.states.push_back(other);
  refuse_layout(table, quantized);
}

}  // namespace loadstone
