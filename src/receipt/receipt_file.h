// Defines the names of receipt files, and the largest size that loadstone reads.
#pragma once

#include <cstdint>
#include <string_view>

namespace loadstone {

// Name of the receipt in an output folder. For a single file, or a set of parts, the suffix is
// appended to the file's name.
inline constexpr std::string_view receipt_file_name = "receipt.json";
inline constexpr std::string_view receipt_suffix = ".receipt.json";

// A larger receipt is rejected before it is read. A receipt for a million tensors takes about 700
// MB.
inline constexpr std::uint64_t receipt_json_bytes_max = std::uint64_t{1} << 30;

// Returns true for a relative path that stays in its folder. loadstone opens the paths of a
// receipt, which may come from an untrusted source.
[[nodiscard]] bool is_inside(std::string_view path);

}  // namespace loadstone
