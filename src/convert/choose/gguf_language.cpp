#include "convert/choose/gguf_language.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>

#include "base/text.h"
#include "base/unknown_word.h"
#include "convert/choose/gguf_image.h"
#include "convert/choose/gguf_mix.h"
#include "formats/gguf_keys.h"
#include "formats/metadata.h"

namespace loadstone {

bool has_llama_cpp_names(const Catalog& catalog) {
  return std::ranges::any_of(catalog.tensors(), [](const TensorInfo& tensor) {
    const std::string_view name = tensor.name;
    return is_token_embedding(name) || name.starts_with("blk.") ||
           name.find(".blk.") != std::string_view::npos;
  });
}

std::vector<std::string> missing_tokenizer_keys(const Metadata& metadata) {
  const std::string* const model = find_text(metadata, "tokenizer.ggml.model");
  const bool has_vocabulary = model == nullptr || (*model != "none" && *model != "no_vocab");
  std::vector<std::string> missing;
  if (model == nullptr) missing.emplace_back("tokenizer.ggml.model");
  const auto require = [&](const char* key) {
    if (!metadata.contains(key)) missing.emplace_back(key);
  };
  if (has_vocabulary) require("tokenizer.ggml.tokens");
  if (model != nullptr && *model == "gpt2") require("tokenizer.ggml.merges");
  return missing;
}

std::string lacking_for_mix(const Catalog& catalog, const Metadata& metadata) {
  const std::string* const architecture = find_text(metadata, gguf_architecture_key);
  const bool has_names = has_llama_cpp_names(catalog);
  if (architecture == nullptr) {
    return fmt::format("the source does not specify general.architecture; {}",
                       has_names ? "set it (--arch NAME; metadata= in Python)" : own_converter);
  }
  const std::string name = printable(*architecture, 80);
  if (!has_names) {
    const std::string similar = did_you_mean(name, image_architectures());
    if (!similar.empty()) return fmt::format("'{}' is not an image model{}", name, similar);
    return fmt::format("'{}' is not an image model, and the tensors lack llama.cpp's names; {}",
                       name, own_converter);
  }
  std::vector<std::string> keys = missing_tokenizer_keys(metadata);
  keys.insert(keys.begin(), name + ".block_count");
  return fmt::format("the metadata lacks '{}'; add the keys (--metadata FILE; metadata= in Python)",
                     fmt::join(keys, "', '"));
}

}  // namespace loadstone
