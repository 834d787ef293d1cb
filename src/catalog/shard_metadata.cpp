#include "catalog/shard_metadata.h"

#include <map>
#include <optional>
#include <string_view>
#include <utility>
#include <variant>

#include "base/json_dom.h"
#include "base/json_writer.h"
#include "catalog/adapter_config.h"
#include "catalog/dcp_parts.h"
#include "codec/comfyui/comfyui.h"
#include "formats/gguf.h"
#include "formats/gguf_shapes.h"
#include "formats/metadata.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

using Members = std::map<std::string, std::string, std::less<>>;

// Returns the members of a JSON object, each as JSON text; nullopt for other text.
std::optional<Members> members_of(std::string_view text) {
  dom::parser parser;
  dom::object object;
  if (parsed_json(parser, text).get(object) != simdjson::SUCCESS) return std::nullopt;
  Members members;
  for (const auto field : object) {
    members.insert_or_assign(std::string(field.key), simdjson::minify(field.value));
  }
  return members;
}

std::string members_json(const Members& members) {
  JsonWriter json;
  json.begin_object();
  for (const auto& [key, value] : members) {
    json.key(key);
    json.raw(value);
  }
  json.end_object();
  return json.take();
}

[[noreturn]] void refuse_contradiction(const char* code, const std::string& path, std::string field,
                                       std::string found, std::string expected) {
  throw Error(code, "the metadata of two files of a checkpoint contradict each other",
              {.path = path,
               .field = std::move(field),
               .found = std::move(found),
               .expected = std::move(expected)});
}

// Returns the first text with the layers of the second added; nullopt if one of them has no layers.
std::optional<std::string> joined_layers(std::string_view first, std::string_view second,
                                         const std::string& path) {
  auto all = members_of(first);
  const auto more = members_of(second);
  if (!all || !more || !all->contains("layers") || !more->contains("layers")) return std::nullopt;
  auto layers = members_of(all->at("layers"));
  const auto others = members_of(more->at("layers"));
  if (!layers || !others) return std::nullopt;
  for (const auto& [module, marker] : *others) {
    const auto [known, is_new] = layers->emplace(module, marker);
    if (is_new || known->second == marker) continue;
    refuse_contradiction("q.config", path, std::string(comfyui::layers_metadata_key) + "." + module,
                         marker, known->second);
  }
  all->at("layers") = members_json(*layers);
  all->insert(more->begin(), more->end());
  return members_json(*all);
}

// Returns a string unchanged, and other values as JSON.
std::string text_or_json(const MetadataValue& value) {
  const auto* const text = std::get_if<std::string>(&value.value);
  return text == nullptr ? json_of(value) : *text;
}

}  // namespace

std::vector<std::string> join_metadata(Metadata& all, Metadata more, const std::string& path) {
  std::vector<std::string> lost;
  for (const auto& [key, value] : more) {
    const auto known = all.find(key);
    if (known == all.end() || key == dcp_sharding_key) continue;
    const std::string first = text_or_json(known->second);
    const std::string second = text_or_json(value);
    if (first == second) continue;
    if (key.starts_with(gguf_shape_prefix))
      refuse_contradiction("gg.duplicate", path, key, second, first);
    if (key == adapter_metadata_key)
      refuse_contradiction("format.adapter", path, key, second, first);
    auto joined =
        key == comfyui::layers_metadata_key ? joined_layers(first, second, path) : std::nullopt;
    if (joined) {
      known->second.value = *std::move(joined);
    } else {
      lost.push_back(key);
    }
  }
  all.merge(more);
  return lost;
}

std::vector<std::string> drop_later_metadata(const Metadata& first, Metadata& later) {
  std::vector<std::string> lost;
  std::erase_if(later, [&](const auto& each) {
    const auto& [key, value] = each;
    if (key.starts_with(gguf_shape_prefix)) return false;
    const auto known = first.find(key);
    const bool is_same = known != first.end() && known->second.type == value.type &&
                         text_or_json(known->second) == text_or_json(value);
    if (!is_same && !is_gguf_file_key(key)) lost.push_back(key);
    return true;
  });
  return lost;
}

}  // namespace loadstone
