// Small changes of files and JSON.
#pragma once

#include <string>

#include "fuzz/input.h"

namespace loadstone::fuzz {

// Up to `changes_max` places of a file get other bytes, or it is cut.
[[nodiscard]] std::string mutated_bytes(std::string bytes, Input& input, unsigned changes_max);

// Up to `changes_max` values of a JSON text become others that it could hold: numbers, words that
// stand elsewhere in it; or they go, or stand there twice. It is seldom broken JSON.
[[nodiscard]] std::string mutated_json(std::string text, Input& input, unsigned changes_max);

}  // namespace loadstone::fuzz
