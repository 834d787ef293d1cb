#include "convert/config_dtype.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "boxes/merges.h"
#include "catalog/config_claim.h"
#include "convert/json_text.h"
#include "loadstone/catalog.h"
#include "loadstone/quantized_tensors.h"

namespace loadstone {

namespace {

// Returns whether the output has plain numbers of a narrow dtype: FP8 that stays.
bool keeps(const Plan& plan, Dtype narrow) {
  return std::ranges::any_of(plan.targets, [&](const PlannedTarget& target) {
    return !target.quantization && target.dtype == narrow;
  });
}

// Codes may be stored as floats (bitsandbytes' quant_storage).
bool has_component(const Plan& plan, const PlannedTarget& target) {
  const QuantizedTensors& quantized = plan.catalog->quantized();
  bool found = false;
  for_each_box(target.recipe, [&](const Box& box) {
    found |= box.decoding == no_decoding && quantized.is_component(box.source);
  });
  return found;
}

// Nothing: the plan has no such tensor.
std::optional<Dtype> main_dtype(const Plan& plan) {
  std::array<std::uint64_t, dtype_count> counts = {};
  for (const PlannedTarget& target : plan.targets) {
    if (target.quantization || !is_wide_float(target.dtype) || has_component(plan, target))
      continue;
    counts[static_cast<std::size_t>(target.dtype)] += target.shape.numel().value_or(0);
  }
  const auto most = std::ranges::max_element(counts);
  if (*most == 0) return std::nullopt;
  return static_cast<Dtype>(most - counts.begin());
}

}  // namespace

bool changes_dtype(const Plan& plan) {
  return std::ranges::any_of(plan.targets, [&](const PlannedTarget& target) {
    if (target.quantization || !is_wide_float(target.dtype)) return false;
    bool is_decoded = false;
    bool is_cast = false;
    bool is_kept = false;
    for_each_box(target.recipe, [&](const Box& box) {
      const Encoding before = plan.catalog->tensors()[box.source].encoding;
      is_decoded |= box.decoding != no_decoding;
      (before == Encoding(target.dtype) ? is_kept : is_cast) = true;
    });
    return is_decoded || (is_cast && !is_kept);
  });
}

std::string with_dtype_of(const Plan& plan, std::string_view config) {
  const auto dtype = main_dtype(plan);
  if (!dtype) return std::string(config);
  return with_changes(
      config, [&](std::string_view key, std::string_view value) -> std::optional<std::string> {
        // A quantization scheme's own dtype has another meaning.
        const bool is_scheme =
            std::ranges::find(quantization_members, key) != quantization_members.end();
        if (is_scheme) return std::string(value);
        if (key != "dtype" && key != "torch_dtype") return std::nullopt;
        constexpr std::string_view prefix = "torch.";
        std::string_view text = value;
        if (!text.starts_with('"') || !text.ends_with('"')) return std::nullopt;
        text = text.substr(1, text.size() - 2);
        const bool has_prefix = text.starts_with(prefix);
        if (has_prefix) text.remove_prefix(prefix.size());
        const auto declared = dtype_from_user(text);
        if (!declared || kind(*declared) != DtypeKind::floating) return std::nullopt;
        if (!is_wide_float(*declared) && keeps(plan, *declared)) return std::nullopt;
        std::string name = has_prefix ? "\"torch." : "\"";
        return name.append(dtype_info(*dtype).torch_name) + '"';
      });
}

}  // namespace loadstone
