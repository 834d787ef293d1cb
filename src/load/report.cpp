#include "load/report.h"

#include <utility>

#include "base/finding_json.h"
#include "base/only_errors.h"
#include "boxes/decodings.h"
#include "codec/tensor_table.h"
#include "engine/box_read.h"
#include "plan/values.h"
#include "tensor/tensor_json.h"

namespace loadstone {

namespace {

// Returns the byte ranges of each source from which the target's value was made.
std::vector<SourceRange> source_ranges(const ValueSet& values, const Value& value) {
  std::vector<SourceRange> ranges;
  for (const SourceExtent& extent : source_extents(values, value)) {
    ranges.push_back({.tensor = values.tensors()[extent.source].name,
                      .shard = values.shard_of(extent.source).relative_path,
                      .offset_begin = extent.begin,
                      .offset_end = extent.end});
  }
  return ranges;
}

}  // namespace

static void visit_fields(JsonWriter& json, const SourceRange& range) {
  json.member("tensor", range.tensor);
  json.member("shard", range.shard);
  json.member("offset_begin", range.offset_begin);
  json.member("offset_end", range.offset_end);
}

static void visit_fields(JsonWriter& json, const Provenance& item) {
  json.member("target", item.target);
  json.member("origin", item.origin);
  json.member("kind", item.kind);
  json.member("delivery", item.delivery);
  json.member("sources", item.sources);
  json.optional("merged", item.merged);
  json.member("device", item.device);
  json.member("dtype", item.dtype);
  json.member("shape", item.shape);
  json.optional("encoding", item.encoding);
  json.optional("tie_of", item.tie_of);
  json.optional("reason", item.reason);
  json.member("bytes_written", item.bytes_written);
}

static void visit_fields(JsonWriter& json, const Report& report) {
  json.key("provenance");
  // An object with target names as keys, as in Python; target names are unique in a plan.
  json.begin_object();
  for (const Provenance& item : report.provenance) json.member(item.target, item);
  json.end_object();
  write_work(json, report);
}

std::vector<Provenance> make_provenance(
    const Plan& plan, const std::function<std::uint64_t(std::size_t)>& bytes_written) {
  const ValueSet values = values_of(plan);
  std::vector<Provenance> provenance;
  provenance.reserve(plan.targets.size());
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    const PlannedTarget& target = plan.targets[i];
    Provenance& item = provenance.emplace_back();
    item.target = target.name;
    item.origin = target.recipe.origin;
    item.kind = target.kind;
    item.merged = merged_paths(*plan.catalog, plan.decodings, target.recipe);
    item.delivery = target.delivery;
    item.sources = source_ranges(values, values[i]);
    item.device = target.device;
    item.dtype = target.dtype;
    item.shape = target.shape;
    if (target.quantization) item.encoding = target.quantization->encoding;
    item.tie_of = target.recipe.tie_of;
    item.reason = target.recipe.reason;
    item.bytes_written = bytes_written(i);
    if (target.delivery == Delivery::disk_write || target.delivery == Delivery::disk_keep) {
      item.reason = "offloaded";  // stored in the offload folder instead of the model
    }
  }
  return provenance;
}

std::string to_json(const Report& report) {
  return only_errors([&] { return json_text(report, 2); });
}

}  // namespace loadstone
