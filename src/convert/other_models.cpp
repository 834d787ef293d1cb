#include "convert/other_models.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "base/json_dom.h"
#include "base/python_json.h"
#include "base/text.h"
#include "catalog/config_claim.h"
#include "convert/extras.h"
#include "convert/left_out.h"
#include "convert/plain_codes.h"
#include "formats/metadata.h"
#include "loadstone/quantized_tensors.h"

namespace loadstone {

namespace {

using Element = simdjson::dom::element;

constexpr std::string_view tokens_key = "tokenizer.ggml.tokens";

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

// Skips tokens, which are compared on their own, merges, and keys that describe the file. The
// architecture stays: it gives rows their order.
Fields fields_of(const Metadata& metadata) {
  Fields fields;
  for (const auto& [key, value] : metadata) {
    const bool is_described = key.starts_with("general.") && key != "general.architecture";
    const bool is_of_text = key == tokens_key || key == "tokenizer.ggml.merges";
    if (is_described || key.starts_with("split.") || is_of_text) continue;
    fields.emplace(key, json_of(value));
  }
  return fields;
}

std::string value_in(const Fields& fields, const std::string& name) {
  const auto field = fields.find(name);
  return field == fields.end() ? "absent" : field->second;
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
    constexpr std::size_t length_max = 60;
    found.push_back(fmt::format("{} ({}, and {} in the output)", printable(name),
                                printable(theirs, length_max), printable(ours, length_max)));
  }
  return found;
}

// The parts of a tokenizer's file that give tokens their numbers.
std::string tokens_in(const ExtraFile& file, std::initializer_list<const char*> parts) {
  simdjson::dom::parser parser;
  const PythonJson json = python_json(text_of(file));
  const auto root = parsed_json(parser, json.text);
  std::string text;
  for (const char* const part : parts) {
    Element value;
    if (root.at_pointer(part).get(value) == simdjson::SUCCESS) text += simdjson::minify(value);
  }
  return text;
}

// Returns true for a file, next to a model, that gives tokens their numbers. Of a module's folder,
// all files are compared.
bool is_vocabulary(std::string_view name) {
  constexpr std::array<std::string_view, 13> endings = {"tokenizer.json",
                                                        "tokenizer_config.json",
                                                        "added_tokens.json",
                                                        "tekken.json",
                                                        ".model",
                                                        ".spm",
                                                        ".tiktoken",
                                                        "merges.txt",
                                                        ".codes",
                                                        "vocab.json",
                                                        "vocab.txt",
                                                        "vocab-src.json",
                                                        "vocab-tgt.json"};
  return name.find('/') == std::string_view::npos &&
         std::ranges::any_of(endings, [&](auto ending) { return name.ends_with(ending); });
}

// The text after the line that names the program that wrote it.
std::string merges_in(const ExtraFile& file) {
  const std::string text = text_of(file);
  return text.starts_with("#version") ? text.substr(std::min(text.find('\n'), text.size())) : text;
}

// Returns true if tokens have other numbers. Settings, such as truncation, and the merges of
// tokenizer.json, which releases write differently, do not count.
bool is_another_vocabulary(const ExtraFile& first, const ExtraFile& other) {
  if (have_same_bytes(first, other)) return false;
  if (first.name == "tokenizer_config.json") {
    const std::string ours = tokens_in(first, {"/added_tokens_decoder"});
    const std::string theirs = tokens_in(other, {"/added_tokens_decoder"});
    return !ours.empty() && !theirs.empty() && ours != theirs;
  }
  if (first.name == "merges.txt") return merges_in(first) != merges_in(other);
  if (first.name != "tokenizer.json") return true;
  const std::string ours = tokens_in(first, {"/model/vocab", "/added_tokens"});
  return ours.empty() || ours != tokens_in(other, {"/model/vocab", "/added_tokens"});
}

// A model and the files next to it.
struct Described {
  const Catalog& catalog;
  const std::string& config;
  const std::vector<ExtraFile>& files;

  [[nodiscard]] bool is_gguf() const { return catalog.shards().front().format == FileFormat::gguf; }
  [[nodiscard]] Fields fields() const {
    return is_gguf() ? fields_of(catalog.metadata()) : fields_of(config);
  }
  [[nodiscard]] const ExtraFile* file(std::string_view name) const {
    const auto found = std::ranges::find(files, name, &ExtraFile::name);
    return found == files.end() ? nullptr : &*found;
  }
  [[nodiscard]] std::string path() const {
    const std::vector<Shard>& shards = catalog.shards();
    return printable(shards.size() == 1 ? shards.front().path : catalog.root());
  }
};

void tell_fields(const Described& first, const Described& other, std::vector<Finding>& findings) {
  const Fields ours = first.fields();
  const Fields theirs = other.fields();
  const auto found = differences(ours, theirs);
  if (ours.empty() || theirs.empty() || found.empty()) return;
  constexpr std::size_t shown_max = 5;
  const std::size_t shown = std::min(shown_max, found.size());
  std::string message = fmt::format(
      "the config of the model in '{}' differs from the first model's, which the output has: {}",
      other.path(), fmt::join(found.begin(), found.begin() + shown, ", "));
  if (shown < found.size()) message += fmt::format(" and {} more", found.size() - shown);
  findings.push_back({.severity = Severity::warning,
                      .code = "merge.models",
                      .message = std::move(message),
                      .suggestion = "check which values fit the merged tensors; the first model "
                                    "(or the base) gives them"});
}

// Rows of embeddings belong to tokens.
void tell_vocabulary(const Described& first, const Described& other,
                     std::vector<Finding>& findings) {
  std::vector<std::string> names;
  for (const ExtraFile& ours : first.files) {
    const ExtraFile* const theirs = is_vocabulary(ours.name) ? other.file(ours.name) : nullptr;
    if (theirs != nullptr && is_another_vocabulary(ours, *theirs)) names.push_back(ours.name);
  }
  const std::string tokens(tokens_key);
  const Metadata& ours = first.catalog.metadata();
  const Metadata& theirs = other.catalog.metadata();
  if (ours.contains(tokens) && theirs.contains(tokens) &&
      json_of(ours.at(tokens)) != json_of(theirs.at(tokens))) {
    names.push_back(tokens);
  }
  if (names.empty()) return;
  std::string message = fmt::format(
      "the model in '{}' has a different vocabulary than the first model ({}): rows of its "
      "embeddings may belong to different tokens",
      other.path(), name_list(names));
  findings.push_back({.severity = Severity::warning,
                      .code = "merge.models",
                      .message = std::move(message),
                      .suggestion = "merge models with the same tokens"});
}

// The output has the modules of the first model.
void tell_modules(const Described& first, const Described& other, std::vector<Finding>& findings) {
  std::vector<std::string> names;
  for (const ExtraFile& extra : other.files) {
    if (extra.name.find('/') == std::string::npos) continue;
    const ExtraFile* const ours = first.file(extra.name);
    if (ours == nullptr || !have_same_bytes(*ours, extra)) names.push_back(extra.name);
  }
  if (names.empty()) return;
  std::string message = fmt::format(
      "the modules of the model in '{}' are not merged, and differ from those of the first model: "
      "{}",
      printable(other.catalog.root()), name_list(names));
  findings.push_back({.severity = Severity::warning,
                      .code = "convert.not_copied",
                      .sources = std::move(names),
                      .message = std::move(message),
                      .suggestion = "merge each module on its own"});
}

}  // namespace

void tell_other_models(const Catalog& catalog, const MergeOptions& merge,
                       std::vector<Finding>& findings) {
  const auto& models = catalog.checkpoints();
  if (merge.weights.size() < 2 || models.size() < merge.weights.size()) return;
  const Catalog& base = *models.front();
  const ModelFolder folder = read_model_folder(base, base.root());
  const Described first = {base, folder.config, folder.files};
  for (std::size_t model = 1; model < merge.weights.size(); ++model) {
    const Catalog& each = *models[model];
    const ModelFolder files = read_model_folder(each, each.root());
    const Described other = {each, files.config, files.files};
    const std::string_view claim = claiming_file(files);
    if (!claim.empty() && !each.quantized().has_readable() && may_hold_codes(each)) {
      findings.push_back(unread_claim(claim, each.root()));
    }
    tell_modules(first, other, findings);
    tell_vocabulary(first, other, findings);
    if (first.is_gguf() == other.is_gguf()) tell_fields(first, other, findings);
  }
}

}  // namespace loadstone
