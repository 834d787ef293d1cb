// Reads arbitrary bytes as an importance matrix: expects an Error, or importances that encoders
// accept.
#include <cmath>
#include <cstdlib>

#include "loadstone/error.h"
#include "loadstone/importance.h"
#include "support/memory_storage.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  loadstone::test::MemoryStorage storage;
  storage.add_file("/model.imatrix", {reinterpret_cast<const char*>(data), size});
  try {
    const auto matrix = loadstone::open_importance_matrix("/model.imatrix", &storage);
    std::size_t bytes = 0;
    for (const auto& [name, numbers] : matrix.entries) {
      bytes += numbers->size() * sizeof(float);
      for (const float each : *numbers) {
        if (!std::isfinite(each) || each < 0) std::abort();
      }
    }
    if (matrix.entries.empty() || bytes > size) std::abort();
  } catch (const loadstone::Error&) {
    return 0;
  }
  return 0;
}
