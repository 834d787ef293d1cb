#include "offload/offload.h"

#include <string_view>
#include <utility>

#include "loadstone/error.h"
#include "loadstone/name_hash.h"

namespace loadstone {

std::vector<QuantizedPart> named_parts(const PlannedTarget& target) {
  if (!target.quantization) return {{target.name, target.shape, target.dtype}};
  auto parts = quantized_parts(*target.quantization, target.shape, target.dtype);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    parts[i].name = i == 0 ? target.name : target.name + "." + parts[i].name;
  }
  return parts;
}

std::vector<OffloadEntry> offload_entries(const Plan& plan, Storage& storage) {
  std::vector<OffloadEntry> entries;
  NameMap<std::size_t> entry_of;  // entries to which other names may be tied
  for (const PlannedTarget& target : plan.targets) {
    const bool keeps = target.delivery == Delivery::disk_keep;
    if (!keeps && target.delivery != Delivery::disk_write) continue;
    if (!target.quantization) entry_of.emplace(target.name, entries.size());
    for (const QuantizedPart& part : named_parts(target)) {
      entries.push_back(
          {.target = part.name, .dtype = dtype_info(part.dtype).torch_name, .shape = part.shape});
    }
    if (target.quantization) continue;
    OffloadEntry& entry = entries.back();
    if (entry.dtype.empty()) {
      throw Error("plan.dtype", "the format of offload folders does not support this dtype",
                  {.tensor = target.name, .found = std::string(name(target.dtype))});
    }
    if (!keeps) continue;
    const TensorInfo& source = plan.catalog->tensors().at(target.recipe.boxes.at(0).source);
    entry.safetensors_file = storage.resolve(plan.catalog->shards()[source.shard].path);
    entry.weight_name = source.name;
  }
  // A tie has an entry for the same bytes under a different name.
  for (const PlannedTarget& target : plan.targets) {
    if (target.recipe.origin != Origin::tie) continue;
    const auto root = entry_of.find(target.recipe.tie_of);
    if (root == entry_of.end()) continue;
    OffloadEntry entry = entries[root->second];
    if (entry.safetensors_file.empty()) entry.tie_of = entry.target;
    entry.target = target.name;
    entries.push_back(std::move(entry));
  }
  return entries;
}

}  // namespace loadstone
