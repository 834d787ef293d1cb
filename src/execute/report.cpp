#include "execute/report.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "base/finding_json.h"
#include "base/json_writer.h"
#include "base/only_errors.h"
#include "boxes/dims.h"
#include "codec/tensor_table.h"
#include "execute/walk.h"
#include "plan/decodings.h"
#include "plan/merges.h"

namespace loadstone {

namespace {

// One range a source, in the order in which they are met. Not thread-safe.
class SourceRanges {
 public:
  explicit SourceRanges(const Catalog& catalog) : catalog_(catalog) {}

  // Bytes from the tensor's first one on.
  void add(std::uint32_t source, std::uint64_t begin, std::uint64_t end) {
    const TensorInfo& tensor = catalog_.tensors()[source];
    begin += tensor.offset_begin;
    end += tensor.offset_begin;
    const auto [place, is_new] = seen_.emplace(source, ranges_.size());
    if (is_new) {
      ranges_.push_back({.tensor = tensor.name,
                         .shard = catalog_.shards()[tensor.shard].relative_path,
                         .offset_begin = begin,
                         .offset_end = end});
      return;
    }
    SourceRange& range = ranges_[place->second];
    range.offset_begin = std::min(range.offset_begin, begin);
    range.offset_end = std::max(range.offset_end, end);
  }

  [[nodiscard]] std::vector<SourceRange> take() { return std::move(ranges_); }

 private:
  const Catalog& catalog_;
  std::vector<SourceRange> ranges_;
  std::unordered_map<std::uint32_t, std::size_t> seen_;
};

// The bytes of each source that the target's value came from.
std::vector<SourceRange> source_ranges(const Plan& plan, const PlannedTarget& target) {
  SourceRanges ranges(*plan.catalog);
  const auto add = [&](const Box& box, const PlannedTarget& of) {
    if (is_empty(box)) return;
    const ByteBox bytes = check_box(plan, of, box);
    std::uint64_t last = bytes.box.source_offset;
    for (const BoxDim& dim : bytes.box.dims) last += (dim.extent - 1) * dim.source_stride;
    DecodeForm form;
    if (box.decoding == no_decoding) {
      ranges.add(box.source, bytes.box.source_offset * bytes.source_bytes,
                 (last + 1) * bytes.source_bytes);
    } else if (!check_decoding(plan.catalog->tensors(), plan.decodings[box.decoding], form)) {
      const auto& sources = plan.decodings[box.decoding].sources;
      for (std::size_t i = 0; i < sources.size(); ++i) {
        const auto part = form.part_bytes(i, bytes.box.source_offset, last + 1);
        if (part.size() > 0) ranges.add(sources[i], part.begin, part.end);
      }
    }
  };
  if (target.recipe.merge == nullptr) {
    for (const Box& box : target.recipe.boxes) add(box, target);
  } else {
    PlannedTarget numbers = {.name = target.name, .shape = target.shape, .dtype = Dtype::f32};
    for (const Box& box : target.recipe.boxes) add(box, numbers);
    for_each_operand(*target.recipe.merge, [&](const Operand& operand) {
      numbers.shape = operand.elements != 0 ? Shape{operand.elements} : target.shape;
      for (const Box& box : operand.boxes) add(box, numbers);
    });
  }
  auto found = ranges.take();
  if (!found.empty()) return found;
  // A tensor without elements has sources too, of which no byte is read.
  SourceRanges none(*plan.catalog);
  for (const std::uint32_t source :
       sources_of(target.recipe.boxes, plan.decodings, target.recipe.merge)) {
    none.add(source, 0, 0);
  }
  return none.take();
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
    item.sources = source_ranges(plan, target);
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
    json.member("staging_bytes_peak", report.staging_bytes_peak);
    json.end_object();
    return json.take();
  });
}

}  // namespace loadstone
