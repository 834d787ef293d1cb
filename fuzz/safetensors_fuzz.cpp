// Reads arbitrary bytes as a safetensors file: expects an Error, or a catalog within the bytes.
#include "fuzz/catalog_fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return loadstone::fuzz::open_as("/model.safetensors", {data, size});
}
