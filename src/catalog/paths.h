// Paths as text: nothing here asks the file system.
#pragma once

#include <string>
#include <string_view>

namespace loadstone {

[[nodiscard]] std::string join_path(std::string_view folder, std::string_view name);
// The folder that a path stands in; "." for a bare name.
[[nodiscard]] std::string parent_path(std::string_view path);
[[nodiscard]] std::string_view file_name(std::string_view path) noexcept;
// Whether `path` is `folder` or lies below it; both absolute and without links.
[[nodiscard]] bool is_below(std::string_view path, std::string_view folder) noexcept;

}  // namespace loadstone
