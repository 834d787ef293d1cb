// Folders below a model's own that its configs name: modules of sentence-transformers, components
// of a pipeline.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "loadstone/storage.h"

namespace loadstone {

inline constexpr std::string_view modules_name = "modules.json";
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

}  // namespace loadstone
