#include "plan/costs.h"

#include <algorithm>
#include <optional>

#include "base/checked.h"
#include "boxes/cast_kind.h"
#include "boxes/decodings.h"
#include "boxes/dims.h"
#include "catalog/reading_threads.h"
#include "loadstone/remote.h"
#include "plan/values.h"

namespace loadstone {

namespace {

// Returns true if the target is exactly one whole source, with elements in the same order, possibly
// cast.
bool has_whole_source(const Plan& plan, const PlannedTarget& target) noexcept {
  if (target.recipe.origin != Origin::checkpoint || target.recipe.boxes.size() != 1) return false;
  if (target.quantization || target.recipe.merge != nullptr) return false;
  const Box& box = target.recipe.boxes.front();
  if (box.decoding != no_decoding) return false;
  const TensorInfo& source = plan.catalog->tensors()[box.source];
  const std::optional<std::uint64_t> elements = target.shape.numel();
  return source.shape.numel() == elements && (elements == 0u || copies_all(box, *elements));
}

}  // namespace

bool is_whole_source(const Plan& plan, const PlannedTarget& target) noexcept {
  if (!has_whole_source(plan, target)) return false;
  const TensorInfo& source = plan.catalog->tensors()[target.recipe.boxes.front().source];
  return source.encoding == Encoding(target.dtype);
}

bool can_keep_on_disk(const Plan& plan, const PlannedTarget& target) noexcept {
  if (!has_whole_source(plan, target)) return false;
  const TensorInfo& source = plan.catalog->tensors()[target.recipe.boxes.front().source];
  if (is_remote(plan.catalog->shards()[source.shard].path)) return false;
  const CastKind way = cast_kind(source.encoding, target.dtype);
  const bool is_float_cast = way == CastKind::cast && kind(target.dtype) == DtypeKind::floating;
  return (way == CastKind::same || is_float_cast) && source.shape == target.shape &&
         plan.catalog->shards()[source.shard].format == FileFormat::safetensors;
}

bool is_mappable(const Catalog& catalog, std::uint32_t shard) noexcept {
  return catalog.assembly(shard) == nullptr && !catalog.shards()[shard].is_on_network;
}

bool comes_over_network(const Plan& plan, const PlannedTarget& target) noexcept {
  return std::ranges::any_of(target.recipe.boxes, [&](const Box& box) {
    return plan.catalog->shards()[plan.catalog->tensors()[box.source].shard].is_on_network;
  });
}

bool can_view(const TensorInfo& tensor) noexcept {
  if (!tensor.encoding.is_dtype()) return false;
  const std::size_t alignment = element_bytes(tensor.encoding.dtype());
  return tensor.byte_count() == 0 || alignment <= 1 || tensor.offset_begin % alignment == 0;
}

bool can_view_file(const Plan& plan, const PlannedTarget& target) noexcept {
  if (!is_whole_source(plan, target)) return false;
  const TensorInfo& source = plan.catalog->tensors()[target.recipe.boxes.front().source];
  return source.byte_count() > 0 && can_view(source) && is_mappable(*plan.catalog, source.shard);
}

std::uint64_t bytes_placed(const PlannedTarget& target) {
  const GivenBy given_by = origin_row(target.recipe.origin).given_by;
  const bool is_the_callers = given_by == GivenBy::caller || given_by == GivenBy::model;
  const bool is_moved =
      target.delivery == Delivery::memory || target.delivery == Delivery::disk_write;
  return is_moved || is_the_callers ? target.byte_count() : 0;
}

// Returns the bytes that a tie check reads for one of its two tensors, including the components.
static std::uint64_t tie_bytes(const Catalog& catalog, std::uint32_t tensor) {
  const TensorRecipe recipe = tensor_recipe(catalog, tensor);
  std::uint64_t bytes = 0;
  for (const std::uint32_t source : sources_of(recipe.boxes, recipe.decodings)) {
    bytes = saturating_add(bytes, catalog.tensors()[source].byte_count());
  }
  return bytes;
}

void count_costs(Plan& plan) {
  plan.bytes_to_write = 0;
  plan.peak_bytes.clear();
  std::uint64_t& cpu = plan.peak_bytes["cpu"];
  for (const PlannedTarget& target : plan.targets) {
    const std::uint64_t bytes = bytes_placed(target);
    if (target.delivery == Delivery::disk_write) {
      plan.bytes_to_write = saturating_add(plan.bytes_to_write, bytes);
    } else if (bytes > 0) {
      std::uint64_t& peak = plan.peak_bytes[target.device];
      peak = saturating_add(peak, bytes);
    }
  }
  const ValueSet values = values_of(plan);
  const Limits limits = limits_of(plan, values);
  plan.bytes_to_read = limits.bytes_to_read();
  for (const TieCheck& check : plan.tie_checks) {
    for (const std::uint32_t tensor : {check.taken, check.other}) {
      plan.bytes_to_read = saturating_add(plan.bytes_to_read, tie_bytes(*plan.catalog, tensor));
    }
  }
  cpu = saturating_add(cpu, limits.bytes_promised(promise_of(plan)));
  if (plan.bytes_to_read > 0) cpu = saturating_add(cpu, reading_bytes(*plan.catalog, plan.threads));
  if (plan.bytes_to_write > 0) plan.peak_bytes["disk"] = plan.bytes_to_write;
}

}  // namespace loadstone
