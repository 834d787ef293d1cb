#include "convert/file_roles.h"

#include "base/words.h"
#include "convert/sub_folders.h"

namespace loadstone {

namespace {

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
// Tokenizers and templates have names of their own.
constexpr std::string_view usual_endings = ".model .tiktoken .codes .jinja";
constexpr std::string_view usual_texts = "README LICENSE LICENCE NOTICE USE_POLICY MODEL_CARD";

// "model.safetensors.index.json", and "model.safetensors.index.fp16.json" of a variant.
bool is_index(std::string_view name) {
  return name.ends_with(".json") && name.find(".index.") != std::string_view::npos;
}

}  // namespace

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
