#include "convert/moved_codes.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "base/json_dom.h"
#include "base/json_writer.h"
#include "base/text.h"
#include "boxes/dims.h"
#include "catalog/quantized_names.h"
#include "codec/comfyui/comfyui.h"
#include "codec/companions.h"
#include "codec/tensor_table.h"
#include "convert/choose/quantize_config.h"
#include "convert/repack.h"
#include "loadstone/catalog.h"

namespace loadstone {

namespace {

constexpr std::string_view advice =
    "decode them with --dequantize (and quantize them again with --quantize), or do not rename "
    "them";
// Advice for codes that cannot be decoded, for which --dequantize has no effect.
constexpr std::string_view advice_on_unreadable = "do not rename them";

using Sources = std::vector<std::uint32_t>;

// Recognises codes by names, dtypes and shapes only, so that source and output are comparable.
QuantizedTensors quantized_by_name(std::vector<TensorInfo> tensors) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].shard = 0;
    tensors[i].offset_begin = tensors[i].offset_end = i + 1;
  }
  return name_quantized_tensors({{}, std::vector<Shard>(1), std::move(tensors), {}, {}});
}

// Returns the output's tensors in the order of the targets.
std::vector<TensorInfo> tensors_of_output(const Plan& plan) {
  std::vector<TensorInfo> tensors;
  tensors.reserve(plan.targets.size());
  for (const PlannedTarget& target : plan.targets) {
    TensorInfo& tensor = tensors.emplace_back();
    tensor.name = target.name;
    tensor.encoding = target.dtype;
    tensor.shape = target.shape;
  }
  return tensors;
}

bool is_unknown_layout(const QuantizedTensor* quantized) {
  return quantized != nullptr && quantized->defect.code == "plan.encoding";
}

// Returns the name that a component `name` of `before` has as a component of `after`.
std::string name_next_to(const QuantizedTensor& after, const QuantizedTensor& before,
                         const std::string& name) {
  const std::string module = before.name.substr(0, before.name.rfind('.') + 1);
  if (!name.starts_with(module)) return name;
  return after.name.substr(0, after.name.rfind('.') + 1) + name.substr(module.size());
}

// Not thread-safe.
class Check {
 public:
  Check(const Plan& plan, const std::set<std::string_view>& components, bool dequantizes)
      : plan_(plan),
        components_(components),
        advice_(dequantizes ? advice_on_unreadable : advice),
        catalog_(*plan.catalog),
        before_(catalog_.quantized()) {}

  std::vector<Finding> run() {
    std::vector<Finding> findings;
    if (before_.empty()) return findings;
    const QuantizedTensors after = quantized_by_name(tensors_of_output(plan_));
    for (std::uint32_t i = 0; i < plan_.targets.size(); ++i) {
      if (components_.contains(plan_.targets[i].name)) continue;
      const Sources codes = codes_in(plan_.targets[i]);
      lost_.reset();
      if (codes.empty() || stays_with_its_scales(i, codes, after)) continue;
      findings.push_back(finding_of(plan_.targets[i], codes));
    }
    return findings;
  }

 private:
  // Returns the sources of the target that are codes and have other components.
  [[nodiscard]] Sources codes_in(const PlannedTarget& target) const {
    Sources codes;
    for (const Box& box : target.recipe.boxes) {
      if (box.decoding != no_decoding && !keeps_block(box)) continue;
      const QuantizedTensor* const found = before_.find(box.source);
      if (found != nullptr && !found->companions().empty()) codes.push_back(box.source);
    }
    return codes;
  }

  [[nodiscard]] bool keeps_block(const Box& box) const {
    return box.decoding != no_decoding && plan_.decodings[box.decoding].dtype == Dtype::u8 &&
           !catalog_.tensors()[box.source].encoding.is_dtype();
  }

  // Returns true if the target copies whole blocks and the output has their scale under the
  // matching name.
  [[nodiscard]] bool block_keeps_scale(const PlannedTarget& target) const {
    constexpr std::string_view weight = "weight";
    const std::vector<Box>& boxes = target.recipe.boxes;
    if (boxes.size() != 1 || !target.name.ends_with(weight)) return false;
    const Decoding& bytes = plan_.decodings[boxes.front().decoding];
    if (target.shape != bytes.shape ||
        !copies_all(boxes.front(), bytes.shape.numel().value_or(0))) {
      return false;
    }
    const std::string name = without_suffix(target.name, weight) + "scale";
    const auto scale = std::ranges::find(plan_.targets, name, &PlannedTarget::name);
    return scale != plan_.targets.end() &&
           whole_sources(*scale) == before_.find(boxes.front().source)->companions();
  }

  // Returns the target's sources in order if the target is one whole source or a stack of whole
  // sources; otherwise nullopt, because only these keep their meaning with scales that move in the
  // same way.
  [[nodiscard]] std::optional<Sources> whole_sources(const PlannedTarget& target) const {
    const std::uint64_t count = target.recipe.boxes.size();
    if (count == 0 || target.quantization) return std::nullopt;
    std::vector<const Box*> boxes;
    for (const Box& box : target.recipe.boxes) boxes.push_back(&box);
    std::ranges::stable_sort(boxes, {}, &Box::target_offset);
    const Shape& first = catalog_.tensors()[boxes.front()->source].shape;
    auto expected = first.extents();
    if (count > 1) expected.insert(expected.begin(), count);
    if (target.shape != Shape(std::move(expected))) return std::nullopt;
    const std::uint64_t elements = first.numel().value_or(0);
    Sources sources;
    for (const Box* const box : boxes) {
      const TensorInfo& source = catalog_.tensors()[box->source];
      const bool is_whole = elements == 0 || inner_run(box->dims).elements == elements;
      if (box->decoding != no_decoding || source.shape != first || !is_whole ||
          source.encoding != Encoding(target.dtype) ||
          box->target_offset != sources.size() * elements) {
        return std::nullopt;
      }
      sources.push_back(box->source);
    }
    return sources;
  }

  // Returns true if names alone do not determine the layout of the codes in the source either.
  // Merged checkpoints are compared as they were read, because their tensors may share names.
  [[nodiscard]] bool was_unknown_layout(std::uint32_t codes) {
    const bool is_one = catalog_.checkpoints().empty();
    if (!named_) named_ = is_one ? quantized_by_name(catalog_.tensors()) : before_;
    return is_unknown_layout(named_->find(codes));
  }

  // Returns true if the output keeps every component that belongs to these codes, in their order.
  [[nodiscard]] bool stays_with_its_scales(std::uint32_t target, const Sources& codes,
                                           const QuantizedTensors& after) {
    if (keeps_block(plan_.targets[target].recipe.boxes.front())) {
      return block_keeps_scale(plan_.targets[target]);
    }
    const auto sources = whole_sources(plan_.targets[target]);
    if (!sources || sources->size() != codes.size()) return false;
    const QuantizedTensor* const found = after.find(target);
    if (found == nullptr) return false;
    if (is_unknown_layout(found) && !was_unknown_layout(codes.front())) return false;
    const Sources companions = found->companions();
    for (std::size_t i = 0; i < sources->size(); ++i) {
      const Sources wanted = before_.find((*sources)[i])->companions();
      if (wanted.size() != companions.size()) return false;
      for (std::size_t k = 0; k < wanted.size(); ++k) {
        const auto given = whole_sources(plan_.targets[companions[k]]);
        if (!given || given->size() != sources->size() || (*given)[i] != wanted[k]) return false;
      }
    }
    return sources->size() > 1 || keeps_others(*before_.find(codes.front()), *found);
  }

  // Returns true if the markers, tables and activation scales are next to the moved codes, where
  // readers expect them.
  [[nodiscard]] bool keeps_others(const QuantizedTensor& before, const QuantizedTensor& after) {
    if (copies_.empty()) {
      for (std::uint32_t i = 0; i < plan_.targets.size(); ++i) {
        const std::vector<Box>& boxes = plan_.targets[i].recipe.boxes;
        if (boxes.size() == 1) copies_.emplace(boxes.front().source, i);
      }
    }
    const auto lost = std::ranges::find_if_not(before.unneeded, [&](std::uint32_t source) {
      const std::string& name = catalog_.tensors()[source].name;
      const auto copy = copies_.find(source);
      const bool is_of_module = is_module_companion(name);
      if (copy == copies_.end() || (is_companion_name(name) && !is_of_module)) return true;
      const PlannedTarget& target = plan_.targets[copy->second];
      if (is_of_module) return std::ranges::count(after.unneeded, copy->second) > 0;
      return target.name == name_next_to(after, before, name) && whole_sources(target).has_value();
    });
    if (lost != before.unneeded.end()) lost_ = *lost;
    return lost == before.unneeded.end();
  }

  [[nodiscard]] Finding finding_of(const PlannedTarget& target, const Sources& codes) const {
    const auto& tensors = catalog_.tensors();
    const std::uint32_t first = before_.find(codes.front())->companions().front();
    const std::string& scale = tensors[lost_.value_or(first)].name;
    Finding finding = {
        .severity = Severity::error,
        .code = "plan.encoding",
        .target = target.name,
        .message = fmt::format(
            "'{}' would contain the {} codes of '{}', but '{}' would not stay with them unchanged",
            printable(target.name), name(target.dtype), printable(tensors[codes.front()].name),
            printable(scale)),
        .suggestion = std::string(advice_),
        .found = std::string(name(target.dtype))};
    for (const std::uint32_t source : codes) finding.sources.push_back(tensors[source].name);
    finding.sources.push_back(scale);
    return finding;
  }

  const Plan& plan_;
  const std::set<std::string_view>& components_;  // components with a known meaning
  std::string_view advice_;
  const Catalog& catalog_;
  const QuantizedTensors& before_;
  std::optional<QuantizedTensors> named_;  // like before_, but recognised by names alone
  std::optional<std::uint32_t> lost_;      // missing component of the codes checked last
  // Index of the target that copies a source, by source.
  std::map<std::uint32_t, std::uint32_t> copies_;
};

// Returns the module that gets the codes of each weight, by the index of the weight in the catalog.
std::map<std::uint32_t, std::string> modules_by_source(const Plan& plan) {
  std::map<std::uint32_t, std::string> modules;
  for (const PlannedTarget& target : plan.targets) {
    if (target.quantization || target.recipe.boxes.size() != 1) continue;
    const Box& box = target.recipe.boxes.front();
    if (box.decoding != no_decoding || target.recipe.merge != nullptr) continue;
    const bool is_number = kind(target.dtype) == DtypeKind::floating && bits(target.dtype) > 8;
    if (!is_number) modules.emplace(box.source, module_of(target.name));
  }
  return modules;
}

// Renames the layers of the object; sets `renamed` to nullopt if no layer is left. Returns false if
// nothing changes.
bool rename_layers(const Plan& plan, const dom::object& root, std::optional<std::string>& renamed) {
  const auto modules = modules_by_source(plan);
  bool is_changed = false;
  bool is_empty = true;
  JsonWriter json;
  json.begin_object();
  for (const auto member : root) {
    json.key(member.key);
    dom::object layers;
    if (member.key != "layers" || member.value.get(layers) != simdjson::SUCCESS) {
      json.raw(simdjson::minify(member.value));
      continue;
    }
    json.begin_object();
    for (const auto layer : layers) {
      const std::string name(layer.key);
      const auto weight = plan.catalog->find(name + ".weight");
      const auto module = weight ? modules.find(*weight) : modules.end();
      is_changed |= module == modules.end() || module->second != name;
      if (module == modules.end()) continue;
      is_empty = false;
      json.key(module->second);
      json.raw(simdjson::minify(layer.value));
    }
    json.end_object();
  }
  json.end_object();
  if (!is_empty) renamed = json.take();
  return is_changed;
}

}  // namespace

std::vector<Finding> check_moved_codes(const Plan& plan,
                                       const std::vector<RepackedTensor>& repacked,
                                       bool dequantizes) {
  const std::set<std::string_view> components = repacked_targets(repacked);
  return Check(plan, components, dequantizes).run();
}

bool moves_codes(const Plan& plan) {
  const QuantizedTensors& quantized = plan.catalog->quantized();
  const auto is_moved = [&](const Box& box) {
    const bool is_decoded =
        box.decoding != no_decoding && plan.decodings[box.decoding].dtype != Dtype::u8;
    return !is_decoded && quantized.find(box.source) != nullptr;
  };
  return std::ranges::any_of(plan.targets, [&](const PlannedTarget& target) {
    return std::ranges::any_of(target.recipe.boxes, is_moved);
  });
}

void keep_layer_metadata(Conversion& conversion, const ConvertOptions& options, bool drops_all) {
  const auto item = conversion.metadata.find(std::string(comfyui::layers_metadata_key));
  if (item == conversion.metadata.end() || options.metadata.contains(item->first)) return;
  std::optional<std::string> renamed;
  if (!drops_all) {
    const auto* const text = std::get_if<std::string>(&item->second.value);
    dom::parser parser;
    dom::object root;
    if (text == nullptr || parsed_json(parser, *text).get(root) != simdjson::SUCCESS) return;
    if (!rename_layers(conversion.plan, root, renamed)) return;
  }
  if (renamed) {
    item->second.value = *std::move(renamed);
  } else {
    conversion.metadata.erase(item);
  }
}

}  // namespace loadstone
