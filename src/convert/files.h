// What writing a target takes from the file system, each with its error.
#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "storage/new_file.h"

namespace loadstone {

// What stands under the name itself, or behind a link; nothing where nothing does. Throws Error
// "io.denied", "io.open".
[[nodiscard]] std::optional<struct stat> status_of(const std::string& path, bool follows);
[[nodiscard]] bool same_file(const struct stat& a, const struct stat& b) noexcept;
// Both are there, and are one file.
[[nodiscard]] bool same_file(const std::string& a, const std::string& b);
[[nodiscard]] bool is_plain_folder(const std::string& path);

void sync_file(int descriptor, const std::string& path);
// So that the names in it are on the disk too.
void sync_folder(const std::string& path);
void write_all(int descriptor, std::uint64_t offset, std::span<const std::byte> bytes,
               const std::string& path);
// One step: what had the name before is gone.
void give_name(const std::string& from, const std::string& to);
// Throws where something has the name already.
[[nodiscard]] Descriptor new_file(const std::string& path);
// A whole file under its name, or nothing; `unfinished` is the path that it has until then.
void write_whole(const std::string& path, const std::string& unfinished, std::string_view text);
// At most so many bytes; nothing where there is no plain file.
[[nodiscard]] std::optional<std::string> read_begin(const std::string& path, std::size_t bytes_max);

}  // namespace loadstone
