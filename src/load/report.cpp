#include "load/report.h"

#include <utility>

#include "base/finding_json.h"
#include "base/json_writer.h"
#include "base/only_errors.h"
#include "codec/tensor_table.h"
#include "engine/source_extents.h"
#include "plan/decodings.h"
#include "plan/values.h"

namespace loadstone {

namespace {

// The bytes of each source that the target's value came from.
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

void write_provenance(JsonWriter& json, const Provenance& item) {
  json.begin_object();
  json.member("target", item.target);
  json.member("origin", name(item.origin));
  json.member("kind", name(item.kind));
  json.member("delivery", name(item.delivery));
  json.key("sources");
  json.begin_array();
  for (const SourceRange& range : item.sources) {
    json.begin_object();
    json.member("tensor", range.tensor);
    json.member("shard", range.shard);
    json.member("offset_begin", range.offset_begin);
    json.member("offset_end", range.offset_end);
    json.end_object();
  }
  json.end_array();
  if (!item.merged.empty()) json.member("merged", item.merged);
  json.member("device", item.device);
  json.member("dtype", name(item.dtype));
  json.member("shape", item.shape.extents());
  if (!item.encoding.empty()) json.member("encoding", item.encoding);
  if (!item.tie_of.empty()) json.member("tie_of", item.tie_of);
  if (!item.reason.empty()) json.member("reason", item.reason);
  json.member("bytes_written", item.bytes_written);
  json.end_object();
}

}  // namespace

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
    item.merged = merged_roots(*plan.catalog, plan.decodings, target.recipe);
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
      item.reason = "offloaded";  // the model does not hold it
    }
  }
  return provenance;
}

std::string to_json(const Report& report) {
  return only_errors([&] {
    JsonWriter json(2);
    json.begin_object();
    json.key("provenance");
    json.begin_object();  // by name, as in Python: a plan's targets have different names
    for (const Provenance& item : report.provenance) {
      json.key(item.target);
      write_provenance(json, item);
    }
    json.end_object();
    write_work(json, report);
    json.end_object();
    return json.take();
  });
}

}  // namespace loadstone
