// Decides by name which files of a model's folder a conversion takes along.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace loadstone {

enum class FileRole : std::uint8_t {
  companion,  // comes along: configs, tokenizers, texts, images, and names that nobody knows
  code,       // Python files, which come along on request only
  weights,    // tensors and archives in any format; a conversion reads or leaves these
  skipped,    // rewritten by each conversion, or of no use to a reader: indexes, caches, locks
};

// `name`: without folders.
[[nodiscard]] FileRole file_role(std::string_view name);

// Returns true for texts and images: a folder that has nothing else comes along as a whole.
[[nodiscard]] bool is_text_or_image(std::string_view name);

// Returns true for files that libraries read with a model.
[[nodiscard]] bool is_usual_companion(std::string_view name);

// Returns true for files that hold a tokenizer's vocabulary.
[[nodiscard]] bool is_vocabulary(std::string_view name);

// Names of companions to ask a host for that lists nothing.
[[nodiscard]] std::vector<std::string> usual_companions();

}  // namespace loadstone
