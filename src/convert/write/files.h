// Names and kinds of files next to a model and where a target is written.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/storage.h"

namespace loadstone {

[[nodiscard]] bool same_file(const FileStatus& a, const FileStatus& b) noexcept;
// Both are there, and are one file.
[[nodiscard]] bool same_file(WritableStorage& storage, const std::string& a, const std::string& b);
[[nodiscard]] bool is_plain_folder(WritableStorage& storage, const std::string& path);
// Returns true if a conversion wrote the file: other programs write files of that name too.
[[nodiscard]] bool is_receipt_file(WritableStorage& storage, const std::string& path);

// ---- folders below a model's own that its configs name

inline constexpr std::string_view modules_name = "modules.json";  // of sentence-transformers
inline constexpr std::string_view pipeline_name = "model_index.json";

// Returns true for a relative path of plain names, which stays below its folder.
[[nodiscard]] bool is_path_below(std::string_view path);
// Paths of the modules in modules.json except the model's own folder; empty for text that is not
// such a list.
[[nodiscard]] std::vector<std::string> module_folders(std::string_view modules);
// Names of the components in model_index.json.
[[nodiscard]] std::vector<std::string> component_folders(std::string_view pipeline);
// Relative paths of everything in a folder except folders, sorted. Links are not followed, and
// folders below the eighth level are listed as they are.
[[nodiscard]] std::vector<std::string> paths_below(WritableStorage& storage,
                                                   const std::string& folder);
// Removes the folder and those below it; false: it holds a file, or one could not be removed.
bool remove_empty_folders(WritableStorage& storage, const std::string& folder);

// ---- which files of a model's folder a conversion takes along, by name

enum class FileRole : std::uint8_t {
  companion,  // comes along: configs, tokenizers, texts, images, and names that nobody knows
  code,       // Python files, which come along on request only
  weights,    // tensors and archives in any format; a conversion reads or leaves these
  skipped,    // rewritten by each conversion, or of no use to a reader: indexes, caches, locks
};
// `name`: without folders.
[[nodiscard]] FileRole file_role(std::string_view name);
// Returns true for texts and images: a folder that has nothing else comes along as a whole.
[[nodiscard]] bool is_text_or_image(std::string_view name);
// Returns true for files that libraries read with a model.
[[nodiscard]] bool is_usual_companion(std::string_view name);
// Returns true for files that hold a tokenizer's vocabulary.
[[nodiscard]] bool is_vocabulary(std::string_view name);
// Names of companions to ask a host for that lists nothing.
[[nodiscard]] std::vector<std::string> usual_companions();

}  // namespace loadstone
