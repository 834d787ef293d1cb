// Declares inputs of conversion tests.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "loadstone/convert.h"

namespace loadstone::test {

// Returns the names of all files and folders below a folder, sorted.
[[nodiscard]] std::vector<std::string> names_in(const std::filesystem::path& folder);

// Returns a file with one tensor of each kind. The tensors are larger than the smallest window.
[[nodiscard]] std::string mixed_file();

// Opens the source, plans and converts.
ConvertReport converted(const std::string& source, const std::string& target,
                        const ConvertOptions& options = {});

}  // namespace loadstone::test
