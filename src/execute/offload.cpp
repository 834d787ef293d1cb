#include "execute/offload.h"

#include <string_view>
#include <utility>

#include "loadstone/error.h"
#include "loadstone/name_hash.h"

namespace loadstone {

std::vector<QuantizedPart> named_parts(const PlannedTarget& target) {
  auto parts = quantized_parts(*target.quantization, target.shape, target.dtype);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    parts[i].name = i == 0 ? target.name : target.name + "." + parts[i].name;
  }
  return parts;
}

std::string_view offload_dtype_name(Dtype dtype) noexcept {
  switch (dtype) {
    case Dtype::boolean:
      return "bool";
    case Dtype::u8:
      return "uint8";
    case Dtype::i8:
      return "int8";
    case Dtype::u16:
      return "uint16";
    case Dtype::i16:
      return "int16";
    case Dtype::u32:
      return "uint32";
    case Dtype::i32:
      return "int32";
    case Dtype::u64:
      return "uint64";
    case Dtype::i64:
      return "int64";
    case Dtype::f16:
      return "float16";
    case Dtype::bf16:
      return "bfloat16";
    case Dtype::f32:
      return "float32";
    case Dtype::f64:
      return "float64";
    case Dtype::c64:
      return "complex64";
    case Dtype::c128:
      return "complex128";
    case Dtype::f8_e4m3:
      return "float8_e4m3fn";
    case Dtype::f8_e5m2:
      return "float8_e5m2";
    case Dtype::f8_e8m0:
      return "float8_e8m0fnu";
    case Dtype::f8_e4m3fnuz:
      return "float8_e4m3fnuz";
    case Dtype::f8_e5m2fnuz:
      return "float8_e5m2fnuz";
    case Dtype::f6_e2m3:
    case Dtype::f6_e3m2:
    case Dtype::f4:
      return {};
  }
  return {};
}

std::vector<OffloadEntry> offload_entries(const Plan& plan, Storage& storage) {
  std::vector<OffloadEntry> entries;
  NameMap<std::size_t> entry_of;  // of targets that may be tied to
  for (const PlannedTarget& target : plan.targets) {
    const bool keeps = target.delivery == Delivery::disk_keep;
    if (!keeps && target.delivery != Delivery::disk_write) continue;
    if (target.quantization) {
      for (const QuantizedPart& part : named_parts(target)) {
        entries.push_back({.target = part.name,
                           .safetensors_file = {},
                           .weight_name = {},
                           .dtype = offload_dtype_name(part.dtype),
                           .shape = part.shape});
      }
      continue;
    }
    entry_of.emplace(target.name, entries.size());
    OffloadEntry& entry = entries.emplace_back();
    entry.target = target.name;
    entry.shape = target.shape;
    entry.dtype = offload_dtype_name(target.dtype);
    if (entry.dtype.empty()) {
      Where where;
      where.tensor = target.name;
      where.found = name(target.dtype);
      throw Error("plan.dtype", "the offload folder's layout has no such dtype", std::move(where));
    }
    if (!keeps) continue;
    const TensorInfo& source = plan.catalog->tensors().at(target.recipe.boxes.at(0).source);
    entry.safetensors_file = storage.resolve(plan.catalog->shards()[source.shard].path);
    entry.weight_name = source.name;
  }
  // The same bytes under another name.
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
