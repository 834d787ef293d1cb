// Handles paths as strings, without access to the file system.
#pragma once

#include <string>
#include <string_view>

namespace loadstone {

[[nodiscard]] std::string join_path(std::string_view folder, std::string_view name);
// Returns the folder of a path; "." for a bare name.
[[nodiscard]] std::string parent_path(std::string_view path);
[[nodiscard]] std::string_view file_name(std::string_view path) noexcept;
// Returns true if `path` is `folder` or below it; both must be absolute and without links.
[[nodiscard]] bool is_below(std::string_view path, std::string_view folder) noexcept;

// Returns true for names of files and folders that conversions keep next to their outputs, such as
// ".loadstone-NAME.done".
[[nodiscard]] inline bool is_own_name(std::string_view name) noexcept {
  return name.starts_with(".loadstone-");
}

}  // namespace loadstone
