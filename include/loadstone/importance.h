// Importance matrices: the weight of each column of a model's matrices, as measured by llama.cpp
// (llama-imatrix). Encoders of GGUF's blocks weigh errors by it. docs/formats/imatrix.md
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
  // By tensor name: one value per column, or per column of each matrix of a stack. Finite and not
  // negative.
  std::map<std::string, std::shared_ptr<const std::vector<float>>, std::less<>> entries;
  // Written to outputs, like by llama-quantize.
  std::string path;                    // as opened
  std::optional<std::string> dataset;  // the first text of the measurement
  std::uint32_t chunks = 0;            // of that text; 0: unknown
};

// Reads either of llama.cpp's formats: GGUF, or the older binary one. Divides sums by their counts.
// Takes 4 bytes per value. `storage` reads the file; null: this machine's file system. Throws Error
// "im.*", "gg.*", "io.*".
[[nodiscard]] LOADSTONE_API ImportanceMatrix open_importance_matrix(const std::string& path,
                                                                    Storage* storage = nullptr);

}  // namespace loadstone
