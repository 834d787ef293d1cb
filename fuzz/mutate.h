// Makes small changes in files and in JSON.
#pragma once

#include <string>

#include "fuzz/input.h"

namespace loadstone::fuzz {

// Changes bytes at up to `changes_max` offsets of a file, or truncates it.
[[nodiscard]] std::string mutated_bytes(std::string bytes, Input& input, unsigned changes_max);

// Changes up to `changes_max` values of a JSON text: replaces them by numbers or by other values of
// the text, deletes or duplicates them. The result is rarely invalid JSON.
[[nodiscard]] std::string mutated_json(std::string text, Input& input, unsigned changes_max);

}  // namespace loadstone::fuzz
