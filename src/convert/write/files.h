// Classifies the files next to a model and at a target by their names and kinds.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/storage.h"

namespace loadstone {

[[nodiscard]] bool same_file(const FileStatus& a, const FileStatus& b) noexcept;
// Returns true if both paths exist and are the same file.
[[nodiscard]] bool same_file(WritableStorage& storage, const std::string& a, const std::string& b);
[[nodiscard]] bool is_plain_folder(WritableStorage& storage, const std::string& path);
// Returns true if a conversion wrote the file. Reads the file, because other programs also write
// files with the name of a receipt.
[[nodiscard]] bool is_receipt_file(WritableStorage& storage, const std::string& path);

// ---- Subfolders of a model's folder that its configs name

inline constexpr std::string_view modules_name = "modules.json";  // file of sentence-transformers
inline constexpr std::string_view pipeline_name = "model_index.json";

// Returns true for a relative path of plain names, which cannot leave its folder.
[[nodiscard]] bool is_path_below(std::string_view path);
// Returns paths of the modules in modules.json except the model's own folder; empty for other text.
[[nodiscard]] std::vector<std::string> module_folders(std::string_view modules);
// Returns the names of the components in model_index.json.
[[nodiscard]] std::vector<std::string> component_folders(std::string_view pipeline);
// Returns the sorted relative paths of everything in a folder except subfolders. Does not follow
// links, and lists folders below the eighth level like files.
[[nodiscard]] std::vector<std::string> paths_below(WritableStorage& storage,
                                                   const std::string& folder);
// Removes the folder and its subfolders. Returns false if there is a file, or if a folder cannot be
// removed.
bool remove_empty_folders(WritableStorage& storage, const std::string& folder);

// ---- Files of a model's folder that a conversion copies, by name

enum class FileRole : std::uint8_t {
  companion,  // copied: configs, tokenizers, texts, images, and unknown names
  code,       // Python files, copied on request only
  weights,    // tensors and archives in any format; a conversion reads or ignores these
  skipped,    // rewritten by each conversion, or useless to a reader: indexes, caches, locks
};
// `name`: the file's name without its folders.
[[nodiscard]] FileRole file_role(std::string_view name);
// Returns true for texts and images. A folder that contains nothing else is copied as a whole.
[[nodiscard]] bool is_text_or_image(std::string_view name);
// Returns true for files that libraries read with a model.
[[nodiscard]] bool is_usual_companion(std::string_view name);
// Returns true for files with a tokenizer's vocabulary.
[[nodiscard]] bool is_vocabulary(std::string_view name);
// Returns the names of companions to request from a host that cannot list a folder.
[[nodiscard]] std::vector<std::string> usual_companions();

}  // namespace loadstone
