#include "convert/other_configs.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "base/json_dom.h"
#include "base/json_writer.h"
#include "base/python_json.h"
#include "base/text.h"
#include "catalog/config_claim.h"
#include "formats/metadata.h"

namespace loadstone {

namespace {

using Element = simdjson::dom::element;

// Values as JSON, by field: "rope_scaling.factor".
using Fields = std::map<std::string, std::string, std::less<>>;

// Returns true for fields that change no number of a model, or that a conversion sets.
bool is_of_file(std::string_view key) {
  constexpr std::array<std::string_view, 9> names = {
      "_name_or_path",   "_commit_hash",  "transformers_version",
      "unsloth_version", "unsloth_fixed", "architectures",
      "use_cache",       "dtype",         "torch_dtype"};
  return std::ranges::count(names, key) > 0 || std::ranges::count(quantization_members, key) > 0;
}

void add_fields(Fields& fields, const std::string& name, const Element& value) {
  simdjson::dom::object object;
  if (value.get(object) != simdjson::SUCCESS) {
    if (!value.is_null()) fields.emplace(name, simdjson::minify(value));
    return;
  }
  for (const auto field : object) {
    if (is_of_file(field.key)) continue;
    const std::string key(field.key);
    add_fields(fields, name.empty() ? key : name + "." + key, field.value);
  }
}

Fields fields_of(const std::string& config) {
  Fields fields;
  simdjson::dom::parser parser;
  const PythonJson json = python_json(config);
  const auto root = parsed_json(parser, json.text);
  if (root.error() == simdjson::SUCCESS) add_fields(fields, "", root.value_unsafe());
  return fields;
}

// Skips arrays, such as vocabularies, and keys that describe the file.
Fields fields_of(const Metadata& metadata) {
  Fields fields;
  for (const auto& [key, value] : metadata) {
    const bool is_described = key.starts_with("general.") || key.starts_with("split.");
    if (is_described || value.type == MetadataType::array) continue;
    JsonWriter json;
    write_json(json, value);
    fields.emplace(key, json.take());
  }
  return fields;
}

std::string value_in(const Fields& fields, const std::string& name) {
  const auto field = fields.find(name);
  return field == fields.end() ? "absent" : printable(field->second, 60);
}

// "rope_theta (500000.0, and 10000.0 in the output)" for each field that differs.
std::vector<std::string> differences(const Fields& first, const Fields& other) {
  Fields all = first;
  all.insert(other.begin(), other.end());
  std::vector<std::string> found;
  for (const auto& [name, unused] : all) {
    const std::string ours = value_in(first, name);
    const std::string theirs = value_in(other, name);
    if (ours == theirs) continue;
    found.push_back(fmt::format("{} ({}, and {} in the output)", printable(name), theirs, ours));
  }
  return found;
}

bool is_gguf(const Catalog& catalog) { return catalog.shards().front().format == FileFormat::gguf; }

Fields declared(const Catalog& catalog, const std::string& config) {
  return is_gguf(catalog) ? fields_of(catalog.metadata()) : fields_of(config);
}

}  // namespace

void tell_other_configs(const Catalog& catalog, const ConvertOptions& options,
                        std::vector<Finding>& findings) {
  const auto& models = catalog.checkpoints();
  const MergeOptions& merge = *options.merge;
  const std::string& config = merge.config.empty() ? options.folder.config : merge.config;
  const Catalog& base = models.empty() ? catalog : *models.front();
  const Fields first = declared(base, config);
  for (std::size_t model = 1; model < merge.weights.size(); ++model) {
    const Catalog& other = *models[model];
    if (is_gguf(base) != is_gguf(other)) continue;
    const Fields fields = declared(other, read_model_config(other, other.root()));
    const auto fields_that_differ = differences(first, fields);
    if (first.empty() || fields.empty() || fields_that_differ.empty()) continue;
    constexpr std::size_t shown_max = 5;
    const std::size_t shown = std::min(shown_max, fields_that_differ.size());
    const std::vector<Shard>& files = other.shards();
    std::string message = fmt::format(
        "the config of the model in '{}' differs from the first model's, which the output has: {}",
        printable(files.size() == 1 ? files.front().path : other.root()),
        fmt::join(fields_that_differ.begin(), fields_that_differ.begin() + shown, ", "));
    if (shown < fields_that_differ.size()) {
      message += fmt::format(" and {} more", fields_that_differ.size() - shown);
    }
    findings.push_back({.severity = Severity::warning,
                        .code = "merge.models",
                        .message = std::move(message),
                        .suggestion = "check which values fit the merged tensors; the first model "
                                      "(or the base) gives them"});
  }
}

}  // namespace loadstone
