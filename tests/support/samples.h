// Inputs of conversion tests.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "loadstone/convert.h"

namespace loadstone::test {

// All names below a folder, sorted.
[[nodiscard]] std::vector<std::string> names_in(const std::filesystem::path& folder);

// One tensor of each kind, too large for the smallest windows.
[[nodiscard]] std::string mixed_file();

// Opens, plans and converts.
ConvertReport converted(const std::string& source, const std::string& target,
                        const ConvertOptions& options = {});

}  // namespace loadstone::test
