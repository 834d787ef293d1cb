#include "codec/unknown/foreign_scale.h"

#include <algorithm>
#include <array>
#include <map>
#include <string_view>
#include <utility>

#include "codec/companions.h"

namespace loadstone {

namespace {

constexpr std::uint32_t none = TensorTable::none;

// A module has only a few tensors. If more names share a prefix, the prefix is not a module.
constexpr std::size_t siblings_max = 64;

// Words in the names of tensors without which codes cannot be interpreted, such as TensorRT-LLM's
// "weights_scaling_factor" and ModelOpt's "weight_quantizer._amax".
constexpr std::array<std::string_view, 9> factor_words = {
    "scale", "scaling", "factor", "zero", "offset", "amax", "absmax", "codebook", "quantizer"};

// Returns the position of the first of factor_words, or npos.
std::size_t factor_at(std::string_view leaf) {
  std::size_t first = std::string_view::npos;
  for (const std::string_view word : factor_words) first = std::min(first, leaf.find(word));
  return first;
}

bool is_factor_leaf(std::string_view leaf) {
  constexpr std::array<std::string_view, 6> others = {"s",         "weight_s",   "zp",
                                                      "weight_zp", "weight_min", "min"};
  return factor_at(leaf) != std::string_view::npos || std::ranges::count(others, leaf) > 0;
}

// Returns true if a tensor belongs to the module itself. `leaf` is its name after the module's
// name.
bool is_of_module(std::string_view leaf) {
  const auto part = leaf.substr(0, leaf.find('.'));
  return part.size() == leaf.size() || part == "weight" || part.ends_with("quantizer");
}

std::string_view leaf_of(std::string_view name) { return name.substr(name.rfind('.') + 1); }

// Returns the name of the scaled tensor: "weight" for "_weight_scale", "weight:scale" and
// "weight_scale_inv", and an empty string for "scale".
std::string_view scaled_by(std::string_view leaf) {
  constexpr std::string_view separators = "_:-";
  leaf = leaf.substr(0, factor_at(leaf));
  leaf.remove_prefix(std::min(leaf.find_first_not_of(separators), leaf.size()));
  return leaf.substr(0, leaf.find_last_not_of(separators) + 1);
}

// Requires a matching name, because an embedding's indices and masks are integers like codes.
bool may_be_codes_of(const TensorInfo& tensor, std::string_view scaled) {
  const std::string_view leaf = leaf_of(tensor.name);
  if (is_factor_leaf(leaf) || is_companion_name(tensor.name)) return false;
  const bool has_name =
      leaf.find(scaled) != std::string_view::npos || scaled.find(leaf) != std::string_view::npos;
  if (is_fp8(tensor) || is_foreign_float(tensor)) return has_name;
  const bool is_integer =
      is_dtype(tensor, {Dtype::i8, Dtype::u8, Dtype::i16, Dtype::u16, Dtype::i32, Dtype::u32});
  return is_integer && tensor.shape.rank() >= 2 && has_name && !scaled.empty();
}

// Returns true if the name belongs to a different tensor of the module: "in_proj_weight_scale"
// belongs to "in_proj_weight", not to "weight".
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

// Returns the prefix of the codes' module, with its dot or underscore, or an empty string.
std::string module_of(const std::string& name) {
  for (const std::string_view leaf : {"weight", "W_q", "codes"}) {
    if (name.ends_with(leaf)) return without_suffix(name, leaf);
  }
  return name + "_";
}

// Returns the scales, zero points and similar tensors of codes that their codec does not read, such
// as "weight_offset" and "weight_scale_second". Scales come first. Excludes companions of
// activations and caches, which companions.h recognises.
std::vector<std::uint32_t> factors_beside(const TensorTable& table, const QuantizedTensor& codes) {
  const std::string& name = codes.name;
  const auto known = codes.companions();
  std::vector<std::uint32_t> found;
  for (const std::string& stem :
       {module_of(name), name + ".", name + "_", name + ":", name + "-"}) {
    for (const std::uint32_t index : table.beginning_with(stem, siblings_max)) {
      const std::string& other = table[index].name;
      const std::string_view leaf = std::string_view(other).substr(stem.size());
      const bool is_known = index == codes.data || std::ranges::count(known, index) > 0 ||
                            std::ranges::count(found, index) > 0;
      if (is_known || !is_of_module(leaf) || !is_factor_leaf(leaf)) continue;
      if (is_companion_name(other) || is_of_another(table, other, codes)) continue;
      found.push_back(index);
    }
  }
  std::ranges::stable_partition(found, [&](std::uint32_t index) {
    return leaf_of(table[index].name).find("scal") != std::string_view::npos;
  });
  return found;
}

bool has_companion(const TensorTable& table, const std::string& name) {
  const std::string module = module_of(name);
  const auto all = table.beginning_with(module, siblings_max);
  return std::ranges::any_of(all, [&](std::uint32_t index) {
    const std::string& other = table[index].name;
    return is_module_companion(other) && other.find('.', module.size()) == std::string::npos;
  });
}

}  // namespace

void refuse_layout(const TensorTable& table, QuantizedTensor& quantized) {
  std::vector<std::string> sources = {table[quantized.data].name};
  for (const std::uint32_t companion : quantized.companions()) {
    sources.push_back(table[companion].name);
  }
  refuse(quantized, "plan.encoding",
         "is quantized in a layout that this version of loadstone does not decode",
         std::move(sources), table.claim().method);
}

void refuse_without_scales(const TensorTable& table, QuantizedTensor& quantized) {
  const std::string& name = table[quantized.data].name;
  const std::string module = module_of(name);
  std::vector<std::string> missing = {name + "_scale", name + "_scale_inv"};
  // ComfyUI's older files, see comfyui.cpp.
  if (table.find(module + "scale_input") != TensorTable::none) missing = {module + "scale_weight"};
  refuse(quantized, "q.scale_missing", "has no scales, and its values have no meaning without them",
         std::move(missing));
}

std::optional<QuantizedTensor> unknown_codes(const TensorTable& table, std::uint32_t data) {
  const TensorInfo& codes = table[data];
  const bool is_float = is_fp8(codes) || is_foreign_float(codes);
  if (is_factor_leaf(leaf_of(codes.name)) || is_companion_name(codes.name)) return std::nullopt;
  if (!is_float && codes.shape.rank() < 2) return std::nullopt;
  QuantizedTensor made = quantized_tensor(codes.name, data, {});
  const auto factors = factors_beside(table, made);
  if (!factors.empty()) {
    made.scales = {factors.front()};
    made.states.assign(factors.begin() + 1, factors.end());
    refuse_layout(table, made);
  } else if (has_companion(table, codes.name) ||
             (is_foreign_float(codes) && table.claim().is_made)) {
    refuse_without_scales(table, made);
  } else {
    return std::nullopt;
  }
  return made;
}

std::vector<QuantizedTensor> codes_of_unused_scales(const TensorTable& table,
                                                    const std::vector<bool>& is_used) {
  std::map<std::uint32_t, QuantizedTensor> found;
  for (std::uint32_t i = 0; i < table.tensors().size(); ++i) {
    const std::string& name = table[i].name;
    const std::string_view leaf = leaf_of(name);
    const std::size_t at = factor_at(leaf);
    if (at == std::string_view::npos || is_used[i] || is_companion_name(name)) continue;
    const std::string_view scaled = scaled_by(leaf);
    const std::string stem = name.substr(0, name.size() - leaf.size());
    const std::string near = name.substr(0, stem.size() + at);
    const auto add = [&](std::uint32_t data) {
      if (is_fp8(table[i]) && is_fp8(table[data]) && scaled.empty()) return;
      const bool is_in_module = table[data].name.rfind('.') + 1 == stem.size();
      if (!is_in_module || is_used[data] || !may_be_codes_of(table[data], scaled)) return;
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
  if (other == none && name.ends_with("weight")) {  // SVDQuant adds a low-rank product
    other = table.find_any(without_suffix(name, "weight"),
                           {"svdquant_lora_a", "weight_quantizer._svdquant_lora_a"});
  }
  if (other == none && quantized.is_readable()) {
    const auto factors = factors_beside(table, quantized);
    if (!factors.empty()) other = factors.front();
  }
  if (other == none) return;
  quantized.states.push_back(other);
  refuse_layout(table, quantized);
}

}  // namespace loadstone
