#include "convert/file_roles.h"

#include <algorithm>
#include <iterator>
#include <span>

#include "convert/sub_folders.h"

namespace loadstone {

namespace {

constexpr std::string_view weight_endings[] = {
    ".safetensors", ".gguf", ".ggml",    ".bin",    ".pt",       ".pth",      ".ckpt",
    ".distcp",      ".h5",   ".hdf5",    ".keras",  ".msgpack",  ".onnx",     ".onnx_data",
    ".npz",         ".npy",  ".pkl",     ".pickle", ".pdparams", ".ot",       ".pb",
    ".tflite",      ".nemo", ".engine",  ".zip",    ".tar",      ".gz",       ".xz",
    ".zst",         ".7z",   ".parquet", ".arrow",  ".mlmodel",  ".mlpackage"};
constexpr std::string_view skipped_endings[] = {".pyc", ".lock", ".tmp", ".incomplete"};
constexpr std::string_view readable_endings[] = {
    ".json",     ".jsonl", ".txt", ".md",  ".rst", ".yaml", ".yml", ".toml", ".jinja", ".model",
    ".tiktoken", ".csv",   ".tsv", ".png", ".jpg", ".jpeg", ".svg", ".webp", ".gif",   ".pdf"};

constexpr std::string_view usual_companion_names[] = {
    "adapter_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "params.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
    "feature_extractor_config.json",
    "audio_tokenizer_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "scheduler_config.json",
    "dtypes.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
};
// Tokenizers and templates have names of their own.
constexpr std::string_view usual_endings[] = {".model", ".tiktoken", ".codes", ".jinja"};
constexpr std::string_view usual_texts[] = {"README", "LICENSE",    "LICENCE",
                                            "NOTICE", "USE_POLICY", "MODEL_CARD"};

bool has_ending(std::string_view name, std::span<const std::string_view> endings) {
  return std::ranges::any_of(endings, [&](std::string_view each) { return name.ends_with(each); });
}

// "model.safetensors.index.json", and "model.safetensors.index.fp16.json" of a variant.
bool is_index(std::string_view name) {
  return name.ends_with(".json") && name.find(".index.") != std::string_view::npos;
}

}  // namespace

FileRole file_role(std::string_view name) {
  const bool is_skipped = name.starts_with('.') || has_ending(name, skipped_endings);
  if (is_skipped || is_index(name)) return FileRole::skipped;
  if (name.ends_with(".py")) return FileRole::code;
  return has_ending(name, weight_endings) ? FileRole::weights : FileRole::companion;
}

bool is_text_or_image(std::string_view name) { return has_ending(name, readable_endings); }

bool is_usual_companion(std::string_view name) {
  return std::ranges::find(usual_companion_names, name) != std::end(usual_companion_names) ||
         name == pipeline_name || has_ending(name, usual_endings) ||
         file_role(name) == FileRole::code;
}

bool is_vocabulary(std::string_view name) {
  return name.starts_with("tokenizer.") || name.starts_with("vocab.") || name == "tekken.json" ||
         name.ends_with(".model") || name.ends_with(".tiktoken");
}

std::vector<std::string> usual_companions() {
  std::vector<std::string> names(std::begin(usual_companion_names),
                                 std::end(usual_companion_names));
  for (const std::string_view text : usual_texts) {
    for (const char* const ending : {"", ".md", ".txt", ".rst"}) {
      names.push_back(std::string(text) + ending);
    }
  }
  return names;
}

}  // namespace loadstone
