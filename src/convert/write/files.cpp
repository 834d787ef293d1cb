#include "convert/write/files.h"

#include <algorithm>

#include "base/json_dom.h"
#include "base/python_json.h"
#include "base/words.h"
#include "receipt/receipt_file.h"

namespace loadstone {

namespace {

constexpr unsigned levels_max = 8;

void add_below(WritableStorage& storage, const std::string& folder, const std::string& prefix,
               unsigned levels, std::vector<std::string>& paths) {
  for (const std::string& name : storage.list(folder)) {
    const std::string path = folder + "/" + name;
    if (levels > 0 && is_plain_folder(storage, path)) {
      add_below(storage, path, prefix + name + "/", levels - 1, paths);
    } else {
      paths.push_back(prefix + name);
    }
  }
}

void sort_once(std::vector<std::string>& names) {
  std::ranges::sort(names);
  names.erase(std::ranges::unique(names).begin(), names.end());
}

constexpr std::string_view weight_endings =
    ".safetensors .gguf .ggml .bin .pt .pth .ckpt .distcp .h5 .hdf5 .keras .msgpack .onnx "
    ".onnx_data .npz .npy .pkl .pickle .pdparams .ot .pb .tflite .nemo .engine .zip .tar .gz .xz "
    ".zst .7z .parquet .arrow .mlmodel .mlpackage";
constexpr std::string_view skipped_endings = ".pyc .lock .tmp .incomplete";
constexpr std::string_view readable_endings =
    ".json .jsonl .txt .md .rst .yaml .yml .toml .jinja .model .tiktoken .csv .tsv .png .jpg .jpeg "
    ".svg .webp .gif .pdf";

constexpr std::string_view usual_companion_names =
    "adapter_config.json generation_config.json tokenizer.json tokenizer_config.json "
    "tokenizer.model tekken.json params.json special_tokens_map.json added_tokens.json vocab.json "
    "vocab.txt merges.txt chat_template.json chat_template.jinja preprocessor_config.json "
    "processor_config.json image_processor_config.json video_preprocessor_config.json "
    "feature_extractor_config.json audio_tokenizer_config.json modules.json "
    "sentence_bert_config.json config_sentence_transformers.json scheduler_config.json dtypes.json "
    "hf_quant_config.json quantize_config.json quant_config.json";
// Suffixes and prefixes of the names of files that are copied although they are not JSON.
constexpr std::string_view usual_endings = ".model .tiktoken .codes .jinja";
constexpr std::string_view usual_texts = "README LICENSE LICENCE NOTICE USE_POLICY MODEL_CARD";

// Returns true for "model.safetensors.index.json", and for "model.safetensors.index.fp16.json" of a
// variant.
bool is_index(std::string_view name) {
  return name.ends_with(".json") && name.find(".index.") != std::string_view::npos;
}

}  // namespace

bool same_file(const FileStatus& a, const FileStatus& b) noexcept {
  return a.identity.device == b.identity.device && a.identity.inode == b.identity.inode;
}

bool same_file(WritableStorage& storage, const std::string& a, const std::string& b) {
  const auto left = storage.status(a);
  const auto right = storage.status(b);
  return left && right && same_file(*left, *right);
}

bool is_plain_folder(WritableStorage& storage, const std::string& path) {
  const auto status = storage.status(path);
  return status && status->kind == EntryKind::folder;
}

bool is_receipt_file(WritableStorage& storage, const std::string& path) {
  const auto begin =
      path.ends_with(receipt_file_name) ? storage.read_begin(path, 100) : std::nullopt;
  return begin && begin->find("loadstone-receipt") != std::string::npos;
}

bool is_path_below(std::string_view path) {
  constexpr std::size_t name_bytes_max = 255;
  while (true) {
    const std::size_t slash = std::min(path.find('/'), path.size());
    const std::string_view name = path.substr(0, slash);
    if (name.empty() || name == "." || name == ".." || name.size() > name_bytes_max ||
        name.find('\0') != std::string_view::npos || name.starts_with(".loadstone-")) {
      return false;
    }
    if (slash == path.size()) return true;
    path.remove_prefix(slash + 1);
  }
}

std::vector<std::string> module_folders(std::string_view modules) {
  dom::parser parser;
  dom::array items;
  std::vector<std::string> folders;
  if (parsed_json(parser, python_json(modules).text).get(items) != simdjson::SUCCESS)
    return folders;
  for (const auto item : items) {
    std::string_view path;
    if (item["path"].get(path) != simdjson::SUCCESS) continue;
    while (path.ends_with('/')) path.remove_suffix(1);
    if (!path.empty() && path != ".") folders.emplace_back(path);
  }
  sort_once(folders);
  return folders;
}

std::vector<std::string> component_folders(std::string_view pipeline) {
  dom::parser parser;
  dom::object fields;
  std::vector<std::string> folders;
  if (parsed_json(parser, python_json(pipeline).text).get(fields) != simdjson::SUCCESS)
    return folders;
  for (const auto field : fields) {
    dom::array classes;
    if (field.key.starts_with("_") || field.value.get(classes) != simdjson::SUCCESS) continue;
    if (classes.size() == 2 && !classes.at(0).is_null()) folders.emplace_back(field.key);
  }
  sort_once(folders);
  return folders;
}

std::vector<std::string> paths_below(WritableStorage& storage, const std::string& folder) {
  std::vector<std::string> paths;
  add_below(storage, folder, {}, levels_max, paths);
  std::ranges::sort(paths);
  return paths;
}

bool remove_empty_folders(WritableStorage& storage, const std::string& folder) {
  for (const std::string& name : storage.list(folder)) {
    const std::string path = folder + "/" + name;
    if (is_plain_folder(storage, path)) static_cast<void>(remove_empty_folders(storage, path));
  }
  return storage.remove_folder(folder);
}

FileRole file_role(std::string_view name) {
  const bool is_skipped = name.starts_with('.') || ends_with_word(name, skipped_endings);
  if (is_skipped || is_index(name)) return FileRole::skipped;
  if (name.ends_with(".py")) return FileRole::code;
  return ends_with_word(name, weight_endings) ? FileRole::weights : FileRole::companion;
}

bool is_text_or_image(std::string_view name) { return ends_with_word(name, readable_endings); }

bool is_usual_companion(std::string_view name) {
  return is_word(name, usual_companion_names) || name == pipeline_name ||
         ends_with_word(name, usual_endings) || file_role(name) == FileRole::code;
}

bool is_vocabulary(std::string_view name) {
  return starts_with_word(name, "tokenizer. vocab.") || name == "tekken.json" ||
         ends_with_word(name, ".model .tiktoken");
}

std::vector<std::string> usual_companions() {
  std::vector<std::string> names;
  for_each_word(usual_companion_names, [&](std::string_view name) { names.emplace_back(name); });
  for_each_word(usual_texts, [&](std::string_view text) {
    for (const char* const ending : {"", ".md", ".txt", ".rst"}) {
      names.push_back(std::string(text) + ending);
    }
  });
  return names;
}

}  // namespace loadstone
