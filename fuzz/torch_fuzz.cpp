// Any bytes as a torch file: refused with an Error, or a catalog that stays inside them.
#include "fuzz/catalog_fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return loadstone::fuzz::open_as("/model.pt", {data, size});
}
