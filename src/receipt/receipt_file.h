// Names of files that hold receipts, and the longest that is read.
#pragma once

#include <cstdint>
#include <string_view>

namespace loadstone {

// File name in an output folder; next to a single file, or a set of parts, it follows that name.
inline constexpr std::string_view receipt_file_name = "receipt.json";
inline constexpr std::string_view receipt_suffix = ".receipt.json";

// A longer one is rejected before it is read. A receipt of a million tensors has about 700 MB.
inline constexpr std::uint64_t receipt_json_bytes_max = std::uint64_t{1} << 30;

// Returns true for a relative path that stays in its folder: a receipt may be anybody's, and its
// paths are opened.
[[nodiscard]] bool is_inside(std::string_view path);

}  // namespace loadstone
