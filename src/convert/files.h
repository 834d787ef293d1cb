// Looking at what stands where a target is written.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <optional>
#include <string>

namespace loadstone {

// What stands under the name itself, or behind a link; nothing where nothing does. Throws Error
// "io.denied", "io.open".
[[nodiscard]] std::optional<struct stat> status_of(const std::string& path, bool follows);
[[nodiscard]] bool same_file(const struct stat& a, const struct stat& b) noexcept;
// Both are there, and are one file.
[[nodiscard]] bool same_file(const std::string& a, const std::string& b);
[[nodiscard]] bool is_plain_folder(const std::string& path);

// At most so many bytes; nothing where there is no plain file.
[[nodiscard]] std::optional<std::string> read_begin(const std::string& path, std::size_t bytes_max);
// Whether a conversion wrote it: other programs have files of that name too.
[[nodiscard]] bool is_receipt_file(const std::string& path);

}  // namespace loadstone
