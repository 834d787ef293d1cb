// Looking at what stands where a target is written.
#pragma once

#include <string>

#include "loadstone/storage.h"

namespace loadstone {

[[nodiscard]] bool same_file(const FileStatus& a, const FileStatus& b) noexcept;
// Both are there, and are one file.
[[nodiscard]] bool same_file(WritableStorage& storage, const std::string& a, const std::string& b);
[[nodiscard]] bool is_plain_folder(WritableStorage& storage, const std::string& path);

// Whether a conversion wrote it: other programs have files of that name too.
[[nodiscard]] bool is_receipt_file(WritableStorage& storage, const std::string& path);

}  // namespace loadstone
