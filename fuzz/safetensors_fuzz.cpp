// Any bytes as a safetensors file: refused with an Error, or a catalog that stays inside them.
#include "fuzz/catalog_fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return loadstone::fuzz::open_as("/model.safetensors", {data, size});
}
