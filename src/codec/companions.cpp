#include "codec/companions.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "codec/comfyui/comfyui.h"

namespace loadstone {

namespace {

using comfyui::marker_leaf;

enum class Place : std::uint8_t {
  module,     // "P.input_scale" belongs to "P.weight", "P_input_scale" to "P"
  attention,  // "self_attn.k_scale", "self_attn.attn.k_scale" belong to "self_attn.k_proj.weight"
  model       // "P.scaled_fp8" belongs to all tensors below P, or below a parent of P
};

struct Row {
  std::string_view leaf;
  Place place;
};

// The companions of modules in ModelOpt, compressed-tensors, FBGEMM, Mistral, Gemma and ComfyUI;
// then the companions of caches; then ComfyUI's older marker, which a model has only once.
constexpr std::array rows = {
    Row{"input_scale", Place::module},
    Row{"input_zero_point", Place::module},
    Row{"input_global_scale", Place::module},
    Row{"input_scale_ub", Place::module},
    Row{"input_scale_inv", Place::module},
    Row{"output_scale", Place::module},
    Row{"output_zero_point", Place::module},
    Row{"input_activation_scale", Place::module},
    Row{"output_activation_scale", Place::module},
    Row{"activation_scale", Place::module},
    Row{"act_scale", Place::module},
    Row{"qscale_act", Place::module},
    Row{"scale_input", Place::module},
    Row{marker_leaf, Place::module},
    Row{"q_scale", Place::attention},
    Row{"q_zero_point", Place::attention},
    Row{"k_scale", Place::attention},
    Row{"k_cache_scale", Place::attention},
    Row{"k_zero_point", Place::attention},
    Row{"v_scale", Place::attention},
    Row{"v_cache_scale", Place::attention},
    Row{"v_zero_point", Place::attention},
    Row{"kv_scale", Place::attention},
    Row{"kv_cache_scale", Place::attention},
    Row{"kv_zero_point", Place::attention},
    Row{"prob_scale", Place::attention},
    Row{"prob_zero_point", Place::attention},
    Row{"prob_output_scale", Place::attention},
    Row{"prob_output_zero_point", Place::attention},
    Row{"scaled_fp8", Place::model},
};

// Returns the row whose leaf ends the name, or null. Sets `stem` to the name before the leaf,
// including the dot or underscore.
const Row* row_of(std::string_view name, std::string_view& stem) {
  for (const Row& row : rows) {
    if (!name.ends_with(row.leaf)) continue;
    stem = name.substr(0, name.size() - row.leaf.size());
    const bool is_fused = stem.ends_with('_') && row.place == Place::module;
    if (stem.empty() || stem.ends_with('.') || is_fused) return &row;
  }
  return nullptr;
}

// Finds quantized tensors by name. Not thread-safe.
class Owners {
 public:
  explicit Owners(const std::vector<QuantizedTensor>& found) {
    for (std::size_t i = 0; i < found.size(); ++i) {
      by_name_.emplace(found[i].name, i);
      std::string_view module = found[i].name;
      for (int levels = 0; levels < 2 && !module.empty(); ++levels) {
        module = around(module);
        by_module_.emplace(module, i);
      }
    }
  }

  [[nodiscard]] std::optional<std::size_t> of(const Row& row, std::string_view stem) const {
    if (row.place == Place::model) return nearest(stem);
    if (row.place == Place::attention) return of_attention(stem);
    if (stem.ends_with('_')) return exactly(std::string(stem.substr(0, stem.size() - 1)));
    return exactly(std::string(stem) + "weight");
  }

 private:
  // Returns "a.b." for "a.b.c" and "a.b.c.", and an empty string for "a".
  static std::string_view around(std::string_view name) {
    if (name.ends_with('.')) name.remove_suffix(1);
    return name.substr(0, name.rfind('.') + 1);
  }

  // Looks in the module and its parent. Skips the root, because the root is a parent of every
  // module but not an attention module. Other modules may have a learned scalar of the same name.
  [[nodiscard]] std::optional<std::size_t> of_attention(std::string_view stem) const {
    for (const std::string_view module : {stem, around(stem)}) {
      if (module.empty() && !stem.empty()) break;
      if (const auto at = by_module_.find(module); at != by_module_.end()) return at->second;
    }
    return std::nullopt;
  }

  [[nodiscard]] std::optional<std::size_t> exactly(const std::string& name) const {
    const auto at = by_name_.find(name);
    return at == by_name_.end() ? std::nullopt : std::optional(at->second);
  }

  // Returns the first quantized tensor below the module, or below the nearest parent that has one.
  [[nodiscard]] std::optional<std::size_t> nearest(std::string_view stem) const {
    while (true) {
      const auto at = by_name_.lower_bound(stem);
      if (at != by_name_.end() && at->first.starts_with(stem)) return at->second;
      if (stem.empty()) return std::nullopt;
      stem = around(stem);
    }
  }

  std::map<std::string, std::size_t, std::less<>> by_name_;
  std::map<std::string, std::size_t, std::less<>> by_module_;  // the first tensor of each module
};

// Returns true if the tensor may contain learned factors of the model, one per attention head.
bool may_be_learned(const Row& row, const TensorInfo& tensor) {
  return row.place == Place::attention && !is_fp8(tensor) && tensor.shape.numel() != 1u;
}

}  // namespace

bool is_companion_name(std::string_view name) {
  std::string_view stem;
  return row_of(name, stem) != nullptr;
}

bool is_module_companion(std::string_view name) {
  std::string_view stem;
  const Row* const row = row_of(name, stem);
  return row != nullptr && row->place == Place::module;
}

ScalesOf scales_of(std::string_view name) {
  std::string_view stem;
  const Row* const row = row_of(name, stem);
  if (row == nullptr || row->leaf == marker_leaf || row->place == Place::model) {
    return ScalesOf::none;
  }
  return row->place == Place::attention ? ScalesOf::cache : ScalesOf::activations;
}

void attach_companions(const TensorTable& table, std::vector<QuantizedTensor>& found,
                       std::vector<bool>& marks) {
  if (found.empty()) return;
  const Owners owners(found);
  for (std::uint32_t i = 0; i < table.tensors().size(); ++i) {
    std::string_view stem;
    const Row* const row = row_of(table[i].name, stem);
    if (row == nullptr || !table[i].encoding.is_dtype()) continue;
    const auto owner = owners.of(*row, stem);
    if (!owner || found[*owner].data == i) continue;
    marks[i] = true;
    const auto known = found[*owner].companions();
    const bool is_component = std::ranges::count(known, i) > 0;
    if (!is_component && !may_be_learned(*row, table[i])) found[*owner].unneeded.push_back(i);
  }
}

}  // namespace loadstone
