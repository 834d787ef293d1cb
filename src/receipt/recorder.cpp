#include "receipt/recorder.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/checked.h"
#include "boxes/sources.h"
#include "catalog/assembled_file.h"
#include "catalog/paths.h"
#include "engine/box_read.h"
#include "loadstone/error.h"
#include "loadstone/quantized_tensors.h"
#include "loadstone/version.h"
#include "plan/costs.h"
#include "receipt/receipt_file.h"
#include "storage/forwarding.h"

namespace loadstone {

namespace {

constexpr std::uint64_t hole_bytes_max = 64 << 10;
// A tensor with more ranges gets a single range instead, from its first needed byte to its last.
constexpr std::size_t ranges_max = 256;

void join(std::vector<ByteRange>& ranges) {
  std::ranges::sort(ranges, {}, &ByteRange::begin);
  std::vector<ByteRange> joined;
  for (const ByteRange& range : ranges) {
    if (range.begin == range.end) continue;
    if (!joined.empty() && range.begin <= joined.back().end + hole_bytes_max) {
      joined.back().end = std::max(joined.back().end, range.end);
    } else {
      joined.push_back(range);
    }
  }
  if (joined.size() > ranges_max) joined = {{joined.front().begin, joined.back().end}};
  ranges = std::move(joined);
}

// Returns the byte ranges of a source that a box needs. They may extend past the source's end.
std::vector<ByteRange> needed_ranges(const ValueSet& values, const Box& box) {
  if (box.decoding != no_decoding) return {{0, UINT64_MAX}};
  if (is_empty(box)) return {};
  const Encoding encoding = values.tensors().at(box.source).encoding;
  if (!encoding.is_dtype()) return {{0, UINT64_MAX}};
  const Dtype dtype = encoding.dtype();
  const BoxDims sorted = BoxDims::by_source(box);
  const auto dims = sorted.dims();
  const InnerRun run = source_run(dims, hole_bytes_max * 8 / bits(dtype));
  const auto outer = dims.first(run.outer_dims);
  std::uint64_t count = 1;
  for (const BoxDim& dim : outer) count = saturating_mul(count, dim.extent);
  if (count > ranges_max) return {bytes_of(source_range(box), dtype)};
  std::vector<ByteRange> ranges;
  visit_runs(outer, box.source_offset, [&](std::uint64_t begin) {
    ranges.push_back(bytes_of({begin, begin + run.elements}, dtype));
  });
  return ranges;
}

std::string recipe_word(const Plan& plan, const PlannedTarget& target) {
  const Recipe& recipe = target.recipe;
  if (recipe.origin != Origin::checkpoint) return std::string(name(recipe.origin));
  if (recipe.merge != nullptr) return "merge";
  bool is_cast = false;
  for (const Box& box : recipe.boxes) {
    if (box.decoding != no_decoding) return "decode";
    is_cast = is_cast || plan.catalog->tensors()[box.source].encoding != Encoding(target.dtype);
  }
  if (is_cast) return "cast";
  return is_whole_source(plan, target) ? "copy" : "reorder";
}

}  // namespace

std::vector<std::uint32_t> deciding_tensors(const ValueSet& values, const Value& value) {
  std::vector<std::uint32_t> tensors(value.decided_by.begin(), value.decided_by.end());
  for_each_box(value, [&](const Box& box) {
    const QuantizedTensor* const quantized = values.catalog.quantized().find(box.source);
    if (quantized == nullptr) return;
    tensors.insert(tensors.end(), quantized->decided_by.begin(), quantized->decided_by.end());
  });
  return tensors;
}

class ReceiptRecorder::Source final : public ForwardingSource {
 public:
  Source(ReceiptRecorder& recorder, std::uint32_t shard)
      : ForwardingSource(recorder.shards_.sources()[shard]), recorder_(recorder), shard_(shard) {}

  using ByteSource::read;
  void read(std::uint64_t offset, std::span<const std::span<std::byte>> pieces) override {
    ForwardingSource::read(offset, pieces);
    const std::vector<Place>& places = recorder_.places_[shard_];
    for (const std::span<std::byte> piece : pieces) {
      const std::uint64_t end = offset + piece.size();
      auto place = std::ranges::lower_bound(places, end, {}, &Place::begin);
      while (place != places.begin() && std::prev(place)->end_max > offset) {
        --place;
        if (place->end <= offset) continue;
        const std::uint64_t first = std::max(offset, place->begin);
        const std::uint64_t last = std::min(end, place->end);
        recorder_.read_.update(place->item, first - place->begin,
                               piece.subspan(first - offset, last - first));
      }
      offset = end;
    }
  }

 private:
  ReceiptRecorder& recorder_;
  std::uint32_t shard_;
};

ReceiptRecorder::ReceiptRecorder(const ValueSet& values, const OpenShards& shards, DigestKind kind,
                                 std::size_t groups, std::uint64_t waiting_bytes_max)
    : values_(values),
      shards_(shards),
      read_(kind, waiting_bytes_max),
      written_(kind, waiting_bytes_max),
      sources_(shards.sources().begin(), shards.sources().end()),
      groups_(groups),
      places_(sources_.size()) {
  for (std::uint32_t i = 0; i < sources_.size(); ++i) {
    if (sources_[i]) sources_[i] = std::make_shared<Source>(*this, i);
  }
}

void ReceiptRecorder::need(std::size_t group, const Value& value) {
  const auto need_of = [&](std::uint32_t tensor, const std::vector<ByteRange>& ranges) {
    const std::uint64_t bytes = values_.tensors().at(tensor).byte_count();
    if (ranges.empty() && bytes > 0) return;  // an empty box needs no bytes
    auto& known = groups_[group].needed[tensor].ranges;
    for (const ByteRange& range : ranges) {
      known.push_back({std::min(range.begin, bytes), std::min(range.end, bytes)});
    }
    if (known.size() > ranges_max) join(known);
  };
  for_each_box(value, [&](const Box& box) {
    const std::vector<ByteRange> ranges = needed_ranges(values_, box);
    if (box.decoding == no_decoding) return need_of(box.source, ranges);
    for (const std::uint32_t source : values_.decodings[box.decoding].sources) {
      need_of(source, ranges);
    }
  });
  for (const std::uint32_t tensor : deciding_tensors(values_, value)) {
    need_of(tensor, {{0, UINT64_MAX}});
  }
}

void ReceiptRecorder::add(std::size_t number, std::uint64_t bytes,
                          std::optional<std::uint32_t> copied) {
  Group& group = groups_[number];
  const std::uint32_t item = copied ? 0 : written_.add({{0, bytes}});
  if (!copied) group.steps.push_back({&written_, item, group.outputs.size(), nullptr, 0});
  group.outputs.push_back({item, copied});
}

void ReceiptRecorder::prepare() {
  for (Group& group : groups_) {
    for (auto& [tensor, needed] : group.needed) {
      join(needed.ranges);
      needed.item = read_.add(needed.ranges);
      const TensorInfo& info = values_.tensors()[tensor];
      ByteSource* const source = shards_.sources()[info.shard].get();
      group.steps.push_back({&read_, needed.item, 0, source, info.offset_begin});
      group.headers.try_emplace(info.shard);
      places_[info.shard].push_back({info.offset_begin, info.offset_end, 0, needed.item});
    }
    for (auto& [shard, item] : group.headers) {
      item = read_.add(source_file(values_.catalog, shard).header_ranges);
      group.steps.push_back({&read_, item, 0, shards_.sources()[shard].get(), 0});
    }
  }
  for (auto& places : places_) {
    std::ranges::sort(places, {}, &Place::begin);
    std::uint64_t end_max = 0;
    for (Place& place : places) place.end_max = end_max = std::max(end_max, place.end);
  }
}

void ReceiptRecorder::wrote(std::size_t group, std::size_t output, std::uint64_t offset,
                            std::span<const std::byte> bytes) {
  const Output& found = groups_[group].outputs.at(output);
  if (!found.copied) written_.update(found.item, offset, bytes);
}

std::uint64_t ReceiptRecorder::bytes_left(std::size_t group) const {
  std::uint64_t bytes = 0;
  for (const Step& step : groups_[group].steps) bytes += step.table->bytes_left(step.item);
  return bytes;
}

void ReceiptRecorder::complete(std::size_t group, std::size_t number, const Read& read,
                               const GoesOn& goes_on) {
  const Step& step = groups_[group].steps[number];
  const auto read_missing = [&](std::uint64_t at, std::span<std::byte> to) {
    if (step.source == nullptr) return read(step.output, at, to);
    step.source->read(step.begin + at, to);
  };
  step.table->complete(step.item, read_missing, goes_on);
}

Receipt ReceiptRecorder::receipt_of(std::size_t number, std::span<ReceiptTensor> outputs) {
  Group& group = groups_[number];
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto& [item, copied] = group.outputs[i];
    outputs[i].digest =
        copied ? read_.digest(group.needed.at(*copied).item) : written_.digest(item);
  }
  std::map<std::uint32_t, ReceiptFile> files;  // by shard
  for (const auto& [shard, item] : group.headers) {
    files[shard] = source_file(values_.catalog, shard);
    files[shard].header_digest = read_.digest(item);
  }
  for (auto& [tensor, needed] : group.needed) {
    const TensorInfo& info = values_.tensors()[tensor];
    if (needed.ranges == std::vector<ByteRange>{{0, info.byte_count()}}) needed.ranges.clear();
    files[info.shard].tensors.push_back(
        {.name = info.name,
         .encoding = std::string(info.encoding.name()),
         .shape = {info.shape.extents().begin(), info.shape.extents().end()},
         .begin = info.offset_begin,
         .end = info.offset_end,
         .ranges = std::move(needed.ranges),
         .digest = read_.digest(needed.item)});
  }
  Receipt receipt = {.kind = read_.kind(), .program = LOADSTONE_VERSION};
  for (auto& [shard, file] : files) receipt.sources.push_back(std::move(file));
  return receipt;
}

ReceiptFile source_file(const Catalog& catalog, std::uint32_t number) {
  const Shard& shard = catalog.shards()[number];
  ReceiptFile file = {.path = is_inside(shard.relative_path) ? shard.relative_path
                                                             : std::string(file_name(shard.path)),
                      .bytes = shard_bytes(catalog, number)};
  std::size_t end = 0;
  for (const auto& checkpoint : catalog.checkpoints()) {
    end += checkpoint->shards().size();
    if (number >= end) ++file.checkpoint;
  }
  if (shard.data_begin > 0) file.header_ranges.push_back({0, shard.data_begin});
  if (shard.tail_begin != 0 && shard.tail_begin < file.bytes) {
    file.header_ranges.push_back({shard.tail_begin, file.bytes});
  }
  return file;
}

ReceiptTensor planned_tensor(const Plan& plan, const PlannedTarget& target,
                             const QuantizedPart* part) {
  const Shape& shape = part != nullptr ? part->shape : target.shape;
  ReceiptTensor tensor = {
      .name = target.name,
      .component = part != nullptr ? part->name : std::string(),
      .encoding = std::string(Encoding(part != nullptr ? part->dtype : target.dtype).name()),
      .shape = {shape.extents().begin(), shape.extents().end()},
      .end = part != nullptr ? part->byte_count() : target.byte_count(),
      .recipe = part != nullptr ? "encode" : recipe_word(plan, target),
      .codec = target.quantization ? target.quantization->encoding : std::string()};
  for (const auto source : sources_of(target.recipe, plan.decodings)) {
    tensor.sources.push_back(plan.catalog->tensors()[source].name);
  }
  return tensor;
}

Receipt joined_receipt(DigestKind kind, const std::vector<Receipt>& receipts) {
  Receipt joined = {.kind = kind, .program = LOADSTONE_VERSION};
  std::map<std::pair<std::uint32_t, std::string>, ReceiptFile> sources;
  const auto require = [](bool is_same, const std::string& path, const std::string& tensor = {}) {
    if (is_same) return;
    throw Error("io.changed",
                "the source had different bytes when another file of the output was written",
                {.path = path, .tensor = tensor});
  };
  for (const Receipt& receipt : receipts) {
    joined.outputs.insert(joined.outputs.end(), receipt.outputs.begin(), receipt.outputs.end());
    joined.targets.insert(joined.targets.end(), receipt.targets.begin(), receipt.targets.end());
    for (const ReceiptFile& file : receipt.sources) {
      const auto [found, is_new] = sources.try_emplace({file.checkpoint, file.path}, file);
      ReceiptFile& known = found->second;
      if (is_new) continue;
      require(known.bytes == file.bytes && known.header_digest == file.header_digest, file.path);
      known.tensors.insert(known.tensors.end(), file.tensors.begin(), file.tensors.end());
    }
  }
  const auto key = [](const ReceiptTensor& tensor) {
    return std::tie(tensor.begin, tensor.end, tensor.name, tensor.ranges);
  };
  for (auto& [place, file] : sources) {
    std::ranges::stable_sort(file.tensors, {}, key);
    const auto rest = std::ranges::unique(file.tensors, [&](const auto& a, const auto& b) {
      const bool is_same = a.name == b.name && a.begin == b.begin && a.ranges == b.ranges;
      if (is_same) require(a.digest == b.digest, file.path, a.name);
      return is_same;
    });
    file.tensors.erase(rest.begin(), rest.end());
    joined.sources.push_back(std::move(file));
  }
  return joined;
}

}  // namespace loadstone
