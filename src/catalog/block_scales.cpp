#include "catalog/block_scales.h"

#include "loadstone/quantized_tensors.h"

namespace loadstone {

std::vector<std::uint32_t> companions_of_blocks(const Catalog& catalog,
                                                const std::vector<bool>& kept) {
  std::vector<std::uint32_t> found;
  for (const QuantizedTensor& each : catalog.quantized().tensors()) {
    if (each.data >= catalog.tensors_of(0).end) continue;
    const bool is_dtype = catalog.tensors()[each.data].encoding.is_dtype();
    if (is_dtype || (!kept.empty() && kept[each.data])) continue;
    for (const std::uint32_t companion : each.companions()) found.push_back(companion);
    found.insert(found.end(), each.unneeded.begin(), each.unneeded.end());
  }
  return found;
}

}  // namespace loadstone
