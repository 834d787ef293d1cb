#include "catalog/conv1d.h"

#include <simdjson.h>

#include <algorithm>
#include <array>

#include "base/json_dom.h"
#include "base/python_json.h"
#include "catalog/config_file.h"

namespace loadstone {

namespace {

// Models with Conv1D layers. GPT-BigCode, GPT-Neo and Starcoder2 are absent, because their modules
// of the same names are nn.Linear.
constexpr std::array<std::string_view, 6> model_types = {
    "gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder"};

constexpr std::array<std::string_view, 4> conv1d_modules = {"c_attn", "q_attn", "c_proj", "c_fc"};

// Depth of the search. A config may contain configs of parts, such as a decoder, but a part has no
// parts.
constexpr unsigned levels = 2;

bool describes_conv1d(const dom::object& config, unsigned level) {
  std::string_view type;
  if (config["model_type"].get(type) == simdjson::SUCCESS &&
      std::ranges::find(model_types, type) != model_types.end()) {
    return true;
  }
  if (level + 1 == levels) return false;
  for (const auto field : config) {
    dom::object part;
    if (field.value.get(part) == simdjson::SUCCESS && describes_conv1d(part, level + 1)) {
      return true;
    }
  }
  return false;
}

}  // namespace

bool has_conv1d(std::string_view config) {
  dom::parser parser;
  dom::object root;
  if (parsed_json(parser, python_json(config).text).get(root) != simdjson::SUCCESS) {
    return false;
  }
  return describes_conv1d(root, 0);
}

std::optional<bool> has_conv1d(const Catalog& catalog, Storage* storage) {
  // The config may be a link out of the folder, because loadstone uses only its model types.
  const auto text = find_config({catalog.storage(storage), true}, catalog.root(), "config.json");
  return text ? std::optional(has_conv1d(*text)) : std::nullopt;
}

bool is_conv1d_weight(std::string_view name) noexcept {
  constexpr std::string_view suffix = ".weight";
  if (!name.ends_with(suffix)) return false;
  name.remove_suffix(suffix.size());
  return std::ranges::find(conv1d_modules, name.substr(name.rfind('.') + 1)) !=
         conv1d_modules.end();
}

}  // namespace loadstone
