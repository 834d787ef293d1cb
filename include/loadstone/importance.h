// Importance matrices: how much the columns of a model's weights matter, as llama.cpp measures it
// (llama-imatrix). Encoders of GGUF's blocks weigh their errors by it. docs/formats/imatrix.md
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "loadstone/export.h"
#include "loadstone/storage.h"

namespace loadstone {

// Plain data, read by open_importance_matrix(). Thread-safe while nobody writes to it.
struct ImportanceMatrix {
  // By the names of tensors: a number for each column, or for each column of each matrix of a
  // stack. Finite, not negative.
  std::map<std::string, std::shared_ptr<const std::vector<float>>, std::less<>> entries;
  // What outputs say of it, as llama-quantize does.
  std::string path;                    // as it was opened
  std::optional<std::string> dataset;  // the first text that it was measured on
  std::uint32_t chunks = 0;            // of that text; 0: the file does not say
};

// Reads either format of llama.cpp's: GGUF, or the binary one from before. Sums are divided by
// their counts here. All of it comes into memory, 4 bytes a number. `storage` is what the file is
// read from; null: the machine's file system. Throws Error "im.*", "gg.*", "io.*".
[[nodiscard]] LOADSTONE_API ImportanceMatrix open_importance_matrix(const std::string& path,
                                                                    Storage* storage = nullptr);

}  // namespace loadstone
