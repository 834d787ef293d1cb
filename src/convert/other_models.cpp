#include "convert/other_models.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/json_dom.h"
#include "base/python_json.h"
#include "base/text.h"
#include "base/words.h"
#include "catalog/config_claim.h"
#include "convert/output_recipes.h"
#include "convert/write/extras.h"
#include "convert/write/files.h"
#include "formats/gguf.h"
#include "formats/metadata.h"
#include "loadstone/quantized_tensors.h"

namespace loadstone {

namespace {

constexpr std::string_view tokens_key = "tokenizer.ggml.tokens";
constexpr std::string_view template_key = "chat_template";
constexpr std::string_view template_name = "chat_template.jinja";
constexpr std::string_view tokenizer_name = "tokenizer.json";
constexpr std::string_view settings_name = "tokenizer_config.json";
constexpr std::string_view generation_name = "generation_config.json";

// Values as JSON text, by the path of their field: "rope_scaling.factor".
using Fields = std::map<std::string, std::string, std::less<>>;

// Returns true for fields that affect no value of a model, or that a conversion sets itself.
bool is_ignored_field(std::string_view key) {
  constexpr std::string_view names =
      "_name_or_path _commit_hash transformers_version unsloth_version unsloth_fixed architectures "
      "use_cache dtype torch_dtype";
  return is_word(key, names) || std::ranges::count(quantization_members, key) > 0;
}

// Returns the text of a token that is stored as an object with settings; otherwise the value as
// JSON.
std::string token_or_json(const dom::element& value) {
  dom::element content;
  const bool is_token = value["lstrip"].error() == simdjson::SUCCESS &&
                        value["content"].get(content) == simdjson::SUCCESS;
  return simdjson::minify(is_token ? content : value);
}

// Returns the value as JSON; an empty string for null, "" and [].
std::string setting_json(const dom::element& value) {
  dom::array items;
  if (value.get(items) != simdjson::SUCCESS) {
    const std::string text = token_or_json(value);
    return value.is_null() || text == R"("")" ? std::string() : text;
  }
  std::vector<std::string> texts;
  std::ranges::transform(items, std::back_inserter(texts), token_or_json);
  return texts.empty() ? std::string() : fmt::format("[{}]", fmt::join(texts, ","));
}

void add_fields(Fields& fields, const std::string& name, const dom::element& value) {
  dom::object object;
  if (value.get(object) != simdjson::SUCCESS || value["lstrip"].error() == simdjson::SUCCESS) {
    std::string json = setting_json(value);
    if (!json.empty()) fields.emplace(name, std::move(json));
    return;
  }
  for (const auto field : object) {
    if (is_ignored_field(field.key)) continue;
    const std::string key(field.key);
    add_fields(fields, name.empty() ? key : name + "." + key, field.value);
  }
}

// Returns the fields of a JSON text; nullopt if the text is not JSON.
std::optional<Fields> fields_in(const std::string& text) {
  dom::parser parser;
  dom::element root;
  if (parsed_json(parser, python_json(text).text).get(root) != simdjson::SUCCESS) return {};
  Fields fields;
  add_fields(fields, "", root);
  return fields;
}

Fields fields_of(const std::string& config) { return fields_in(config).value_or(Fields()); }

// Returns the fields of a file; a file that is not JSON is one field.
Fields fields_of(const ExtraFile& file, WritableStorage& storage) {
  std::string text = text_of(file, storage);
  auto fields = fields_in(text);
  return fields ? *std::move(fields) : Fields{{"text", std::move(text)}};
}

// Returns the fields of GGUF metadata. Skips merges, keys that describe the file, and tokens, which
// are compared separately. Keeps the architecture, because it determines the order of rows.
Fields fields_of(const Metadata& metadata) {
  Fields fields;
  for (const auto& [key, value] : metadata) {
    const bool is_described = key.starts_with("general.") && key != "general.architecture";
    const bool is_of_text = key == tokens_key || key == "tokenizer.ggml.merges";
    if (is_described || is_gguf_file_key(key) || is_of_text) continue;
    fields.emplace(key, json_of(value));
  }
  return fields;
}

std::string value_in(const Fields& fields, const std::string& name) {
  const auto field = fields.find(name);
  return field == fields.end() ? "absent" : field->second;
}

// Returns a string such as "rope_theta (500000.0, and 10000.0 in the output)" for each field that
// differs.
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

// Returns the `parts` of a tokenizer's file, which assign ids to tokens.
std::string tokens_in(const ExtraFile& file, std::initializer_list<const char*> parts,
                      WritableStorage& storage) {
  dom::parser parser;
  const auto root = parsed_json(parser, python_json(text_of(file, storage)).text);
  std::string text;
  for (const char* const part : parts) {
    dom::element value;
    if (root.at_pointer(part).get(value) == simdjson::SUCCESS) text += simdjson::minify(value);
  }
  return text;
}

// Returns true for a file in the model's own folder that assigns ids to tokens. In folders of
// modules all files are compared.
bool is_token_file(std::string_view name) {
  constexpr std::string_view endings =
      "tokenizer.json tokenizer_config.json added_tokens.json tekken.json .model .spm .tiktoken "
      "merges.txt .codes vocab.json vocab.txt vocab-src.json vocab-tgt.json";
  return name.find('/') == std::string_view::npos && ends_with_word(name, endings);
}

// Returns the merges without the first line, which names the program that wrote the file.
std::string merges_in(const ExtraFile& file, WritableStorage& storage) {
  const std::string text = text_of(file, storage);
  return text.starts_with("#version") ? text.substr(std::min(text.find('\n'), text.size())) : text;
}

// Returns true if the files assign different ids to tokens. Ignores settings, such as truncation,
// and the merges in tokenizer.json, because their format depends on the tokenizer library's
// version.
bool is_another_vocabulary(const ExtraFile& first, const ExtraFile& other,
                           WritableStorage& storage) {
  if (have_same_bytes(first, other, storage)) return false;
  if (first.name == "tokenizer_config.json") {
    const std::string ours = tokens_in(first, {"/added_tokens_decoder"}, storage);
    const std::string theirs = tokens_in(other, {"/added_tokens_decoder"}, storage);
    return !ours.empty() && !theirs.empty() && ours != theirs;
  }
  if (first.name == "merges.txt") {
    return merges_in(first, storage) != merges_in(other, storage);
  }
  if (first.name != "tokenizer.json") return true;
  const std::string ours = tokens_in(first, {"/model/vocab", "/added_tokens"}, storage);
  return ours.empty() || ours != tokens_in(other, {"/model/vocab", "/added_tokens"}, storage);
}

// A model or an adapter, with the files next to it.
struct DescribedModel {
  const Catalog& catalog;
  const std::string& config;
  const std::vector<ExtraFile>& files;
  bool is_adapter = false;

  [[nodiscard]] WritableStorage& storage() const { return catalog.storage().writable(); }
  [[nodiscard]] const char* what() const { return is_adapter ? "adapter" : "model"; }
  [[nodiscard]] bool is_gguf() const { return catalog.shards().front().format == FileFormat::gguf; }
  [[nodiscard]] Fields fields() const {
    return is_gguf() ? fields_of(catalog.metadata()) : fields_of(config);
  }
  [[nodiscard]] const ExtraFile* file(std::string_view name) const {
    const auto found = std::ranges::find(files, name, &ExtraFile::name);
    return found == files.end() ? nullptr : &*found;
  }
  [[nodiscard]] std::string path() const { return printable(catalog.shown_path()); }
};

Finding warning(const char* code, std::vector<std::string> sources, std::string message,
                std::string suggestion) {
  return {.severity = Severity::warning,
          .code = code,
          .sources = std::move(sources),
          .message = std::move(message),
          .suggestion = std::move(suggestion)};
}

// Joins the first names to a text such as "a, b and 3 more".
std::string first_of(const std::vector<std::string>& found) {
  constexpr std::size_t shown_max = 5;
  const std::size_t shown = std::min(shown_max, found.size());
  std::string text = fmt::format("{}", fmt::join(found.begin(), found.begin() + shown, ", "));
  if (shown < found.size()) text += fmt::format(" and {} more", found.size() - shown);
  return text;
}

void tell_fields(const DescribedModel& first, const DescribedModel& other,
                 std::vector<Finding>& findings) {
  const Fields ours = first.fields();
  const Fields theirs = other.fields();
  const auto found = differences(ours, theirs);
  if (ours.empty() || theirs.empty() || found.empty()) return;
  findings.push_back(warning(
      "merge.models", {},
      fmt::format(
          "the config of the {} in '{}' differs from the first model's, which the output gets: {}",
          other.what(), other.path(), first_of(found)),
      "check which values fit the merged tensors; the output gets those of the first model (or the "
      "base)"));
}

// Returns true for fields that name the program that wrote a file, or its classes.
bool is_of_writer(std::string_view name) {
  constexpr std::string_view names =
      "_from_model_config backend feature_extractor_type image_processor_type is_local model_type "
      "local_files_only name_or_path padding_side processor_class special_tokens_map_file "
      "tokenizer_class tokenizer_file vocab_file video_processor_type";
  constexpr std::string_view beginnings = "__version__. added_tokens_decoder.";  // a vocabulary
  return is_word(name, names) || starts_with_word(name, beginnings);
}

// Returns true for fields whose absence in the output matters. Other fields have defaults, which
// only some versions of the libraries write.
bool counts_alone(std::string_view file, std::string_view name) {
  const bool is_token = name.ends_with("_token") || name.ends_with("_tokens");
  return (is_token && !name.starts_with("add_")) || name == template_key ||
         name.starts_with("prompts.") || file == generation_name || file == modules_name;
}

// Returns true for parts of tokenizer.json that determine how a text becomes tokens.
bool is_part_of_tokenizer(std::string_view name) {
  return is_word(name.substr(0, name.find('.')), "normalizer pre_tokenizer post_processor");
}

Fields template_of(const MetadataValue& text) {
  return fields_of(fmt::format(R"({{"{}": {}}})", template_key, json_of(text)));
}

Fields settings_of(const ExtraFile& file, WritableStorage& storage) {
  if (file.name == template_name) return template_of({.value = text_of(file, storage)});
  if (file.name == modules_name) {
    const auto paths = module_folders(text_of(file, storage));
    return {{"paths", fmt::format("{}", fmt::join(paths, ", "))}};
  }
  Fields fields = fields_of(file, storage);
  std::erase_if(fields, [&](const auto& field) {
    return file.name == tokenizer_name ? !is_part_of_tokenizer(field.first)
                                       : is_of_writer(field.first);
  });
  if (auto tokens = fields.extract("extra_special_tokens")) {
    tokens.key() = "additional_special_tokens";  // name in older versions
    fields.insert(std::move(tokens));
  }
  return fields;
}

// Settings by file. All files of a tokenizer share one name, because library versions divide
// settings differently among them.
using Settings = std::map<std::string, Fields, std::less<>>;

bool has_settings(std::string_view name) {
  if (name.starts_with("additional_chat_templates/")) return true;
  if (!is_usual_companion(name) || is_claim(name) || name == adapter_config_name) return false;
  return !is_token_file(name) || name == tokenizer_name || name == settings_name;
}

bool belongs_to_tokenizer(std::string_view name) {
  return name == "special_tokens_map.json" || name.starts_with("chat_template.");
}

Settings all_settings(const DescribedModel& of) {
  Settings all;
  Fields& tokenizer = all[std::string(settings_name)];
  if (of.is_gguf()) {
    const auto text = of.catalog.metadata().find("tokenizer.chat_template");
    if (text != of.catalog.metadata().end()) tokenizer = template_of(text->second);
    return all;
  }
  for (const ExtraFile& file : of.files) {
    if (!has_settings(file.name)) continue;
    Fields& fields = belongs_to_tokenizer(file.name) ? tokenizer : all[file.name];
    for (auto& [name, json] : settings_of(file, of.storage())) {
      if (name == template_key) {
        tokenizer.try_emplace(name, std::move(json));  // the template's own file takes precedence
      } else {
        fields.insert_or_assign(name, std::move(json));
      }
    }
  }
  return all;
}

// Differences in settings as texts, such as "generation_config.json: eos_token_id (2, and 1 in the
// output)", and the names of their files.
struct Found {
  std::vector<std::string> texts;
  std::vector<std::string> names;

  void add(const std::string& name, std::string text) {
    texts.push_back(std::move(text));
    if (std::ranges::count(names, name) == 0) names.push_back(name);
  }
};

void add_differences(const std::string& name, Fields ours, Fields theirs,
                     const DescribedModel& other, Found& found) {
  std::erase_if(ours, [&](const auto& field) {
    return !theirs.contains(field.first) && name != generation_name;
  });
  std::erase_if(theirs, [&](const auto& field) {
    return !ours.contains(field.first) && !counts_alone(name, field.first);
  });
  const bool has_template = other.file(template_name) != nullptr;
  for (const std::string& each : differences(ours, theirs)) {
    const bool is_template = has_template && each.starts_with(template_key);
    const std::string file = is_template ? std::string(template_name) : name;
    found.add(file, fmt::format("{}: {}", printable(file), each));
  }
}

// Warns of files that differ from the first model's files, which the output has. If library
// versions write a vocabulary into several files, the file that all versions read decides.
void tell_files(const DescribedModel& first, const Settings& settings, const DescribedModel& other,
                std::vector<Finding>& findings) {
  if (other.is_gguf()) return;
  Found found;
  Settings all = all_settings(other);
  for (auto& [name, theirs] : all) {
    const auto ours = settings.find(name);
    if (ours == settings.end()) continue;
    if (first.is_gguf()) {  // a GGUF file has the tokens in its metadata
      std::erase_if(theirs, [](const auto& field) { return field.first != template_key; });
    }
    add_differences(name, ours->second, theirs, other, found);
  }
  const bool is_decided =
      first.file(tokenizer_name) != nullptr && other.file(tokenizer_name) != nullptr;
  for (const ExtraFile& file : other.files) {
    const bool is_new = first.file(file.name) == nullptr && !first.is_gguf();
    const bool is_other = has_settings(file.name) && !settings.contains(file.name);
    const bool is_lost = is_token_file(file.name) ? !is_decided && file.name != settings_name
                                                  : is_other && !belongs_to_tokenizer(file.name);
    if (is_new && is_lost) found.add(file.name, printable(file.name) + " (absent in the output)");
  }
  if (found.texts.empty()) return;
  findings.push_back(warning(
      "merge.models", std::move(found.names),
      fmt::format(
          "files of the {} in '{}' differ from the first model's, which the output gets: {}",
          other.what(), other.path(), first_of(found.texts)),
      fmt::format("if you want to use the merged model with them, copy them from the {}'s folder "
                  "into the output",
                  other.what())));
}

// Warns of different vocabularies, because each row of an embedding belongs to a token.
void report_vocabulary(const DescribedModel& first, const DescribedModel& other,
                       std::vector<Finding>& findings) {
  std::vector<std::string> names;
  for (const ExtraFile& ours : first.files) {
    const ExtraFile* const theirs = is_token_file(ours.name) ? other.file(ours.name) : nullptr;
    if (theirs != nullptr && is_another_vocabulary(ours, *theirs, first.storage())) {
      names.push_back(ours.name);
    }
  }
  const std::string tokens(tokens_key);
  const Metadata& ours = first.catalog.metadata();
  const Metadata& theirs = other.catalog.metadata();
  if (ours.contains(tokens) && theirs.contains(tokens) &&
      json_of(ours.at(tokens)) != json_of(theirs.at(tokens))) {
    names.push_back(tokens);
  }
  if (names.empty()) return;
  findings.push_back(warning(
      "merge.models", {},
      fmt::format(
          "the {} in '{}' has a different vocabulary than the first model ({}): rows of its "
          "embeddings may belong to different tokens",
          other.what(), other.path(), name_list(names)),
      other.is_adapter ? "if you want to use the merged model with the adapter's tokenizer, copy "
                         "it into the output"
                       : "merge models with the same tokens"));
}

// Returns true if both files have equal bytes, or are JSON with equal values.
bool are_alike(const ExtraFile& ours, const ExtraFile& theirs, WritableStorage& storage) {
  if (have_same_bytes(ours, theirs, storage)) return true;
  return ours.name.ends_with(".json") && fields_of(ours, storage) == fields_of(theirs, storage);
}

// Warns about modules that differ from the first model's. The output has the first model's modules.
void tell_modules(const DescribedModel& first, const DescribedModel& other,
                  std::vector<Finding>& findings) {
  const ExtraFile* const list = other.file(modules_name);
  if (list == nullptr) return;
  const std::vector<std::string> modules = module_folders(text_of(*list, other.storage()));
  const auto is_of_module = [&](const ExtraFile& file) {
    return std::ranges::any_of(
        modules, [&](const auto& module) { return file.name.starts_with(module + "/"); });
  };
  std::vector<std::string> names;
  for (const ExtraFile& theirs : other.files) {
    if (!is_of_module(theirs)) continue;
    const ExtraFile* const ours = first.file(theirs.name);
    const bool is_alike = ours != nullptr && are_alike(*ours, theirs, first.storage());
    if (!is_alike) names.push_back(theirs.name);
  }
  if (names.empty()) return;
  const std::string list_of_names = name_list(names);
  findings.push_back(warning(
      "convert.not_copied", std::move(names),
      fmt::format("loadstone does not merge the modules of the {} in '{}', which differ from the "
                  "first model's: {}",
                  other.what(), other.path(), list_of_names),
      other.is_adapter
          ? "if they were trained with the adapter, copy them from its folder into the output"
          : "merge each module on its own"));
}

}  // namespace

void tell_other_models(const Catalog& catalog, const MergeOptions& merge, const ModelFolder& given,
                       std::vector<Finding>& findings) {
  const auto& inputs = catalog.checkpoints();
  if (inputs.size() < 2) return;
  const Catalog& base = *inputs.front();
  const bool is_read = !given.config.empty() || !given.files.empty();
  const ModelFolder folder = is_read ? given : read_model_folder(base, base.root());
  const DescribedModel first = {base, folder.config, folder.files};
  const Settings settings = all_settings(first);
  for (std::size_t input = 1; input < inputs.size(); ++input) {
    const Catalog& each = *inputs[input];
    const bool is_added = input >= merge.weights.size();
    // This adapter is not in a PEFT folder, so it has no companion files to compare.
    if (is_added && !is_adapter(each)) continue;
    const ModelFolder files = read_model_folder(each, each.root());
    const DescribedModel other = {each, files.config, files.files, is_added};
    const std::string_view claim = claiming_file(files);
    if (!is_added && !claim.empty() && !each.quantized().has_readable() && may_hold_codes(each)) {
      findings.push_back(unread_claim(claim, each.root()));
    }
    tell_modules(first, other, findings);
    report_vocabulary(first, other, findings);
    tell_files(first, settings, other, findings);
    if (first.is_gguf() == other.is_gguf()) tell_fields(first, other, findings);
  }
}

}  // namespace loadstone
