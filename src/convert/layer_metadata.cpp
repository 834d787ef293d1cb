#include "convert/layer_metadata.h"

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "base/json_dom.h"
#include "base/json_writer.h"
#include "codec/companions.h"
#include "convert/quantize_style.h"

namespace loadstone {

namespace {

// The module of the target that gets the codes of each weight, by the weight's source.
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

// The object with its layers renamed, or nothing where none is left. False: it is as it was.
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

void keep_layer_metadata(Conversion& conversion, const ConvertOptions& options, bool drops_all) {
  const auto item = conversion.metadata.find(std::string(layers_metadata_key));
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
