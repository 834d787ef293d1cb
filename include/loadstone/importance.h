// Importance matrices: the weight of each column of a model's matrices, as measured by llama.cpp
// (llama-imatrix). Encoders of GGUF's blocks weight their errors by these weights.
// docs/formats/imatrix.md specifies the file.
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

// The weights that one file contains. Plain data from open_importance_matrix(). Thread-safe while
// no thread writes to it.
struct ImportanceMatrix {
  // Weights by tensor name: one per column or, for a stack of matrices, one per column of each
  // matrix. Finite and not negative.
  std::map<std::string, std::shared_ptr<const std::vector<float>>, std::less<>> entries;
  // loadstone writes the next three fields to the metadata of outputs, like llama-quantize.
  std::string path;                    // as opened
  std::optional<std::string> dataset;  // name of the first text that was measured
  std::uint32_t chunks = 0;            // number of that text's chunks; 0: unknown
};

// Reads either of llama.cpp's formats: GGUF, or the older binary one. Divides the sums in the file
// by their counts. The result takes 4 bytes per weight. `storage` reads the file; null: this
// machine's file system. Throws Error "im.*", "gg.*", "io.*".
[[nodiscard]] LOADSTONE_API ImportanceMatrix open_importance_matrix(const std::string& path,
                                                                    Storage* storage = nullptr);

}  // namespace loadstone
