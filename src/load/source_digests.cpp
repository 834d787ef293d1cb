#include "load/source_digests.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/checked.h"
#include "boxes/decodings.h"
#include "boxes/sources.h"
#include "catalog/assembled_file.h"
#include "engine/box_read.h"
#include "loadstone/error.h"
#include "plan/costs.h"
#include "receipt/file_digest.h"
#include "storage/forwarding.h"

namespace loadstone {

namespace {

constexpr std::uint64_t hole_bytes_max = 64 << 10;
// A tensor of which more are needed has one from its first byte to its last.
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

// The bytes of a source that a box touches.
std::vector<ByteRange> ranges_of(const Box& box, Dtype dtype) {
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

std::uint32_t checkpoint_of(const Catalog& catalog, std::uint32_t shard) {
  std::uint32_t number = 0;
  std::size_t end = 0;
  for (const auto& checkpoint : catalog.checkpoints()) {
    end += checkpoint->shards().size();
    if (shard < end) return number;
    ++number;
  }
  return 0;
}

}  // namespace

std::string receipt_path(const Shard& shard) {
  const std::filesystem::path path = shard.relative_path;
  const bool leaves = path.is_absolute() || path.empty() ||
                      std::ranges::any_of(path, [](const auto& name) { return name == ".."; });
  return leaves ? std::filesystem::path(shard.path).filename().string() : shard.relative_path;
}

class SourceDigests::Source final : public ForwardingSource {
 public:
  Source(SourceDigests& digests, std::uint32_t shard)
      : ForwardingSource(digests.shards_.sources()[shard]), digests_(digests), shard_(shard) {}

  using ByteSource::read;
  void read(std::uint64_t offset, std::span<const std::span<std::byte>> pieces) override {
    ForwardingSource::read(offset, pieces);
    digests_.hash(shard_, offset, pieces);
  }

 private:
  SourceDigests& digests_;
  std::uint32_t shard_;
};

SourceDigests::SourceDigests(const ValueSet& values, const OpenShards& shards, DigestKind kind,
                             std::size_t groups, std::uint64_t waiting_bytes_max)
    : values_(values),
      shards_(shards),
      table_(kind, waiting_bytes_max),
      sources_(shards.sources().begin(), shards.sources().end()),
      needed_(groups),
      places_(sources_.size()) {
  for (std::uint32_t i = 0; i < sources_.size(); ++i) {
    if (sources_[i]) sources_[i] = std::make_shared<Source>(*this, i);
  }
}

void SourceDigests::add(std::size_t group, std::uint32_t tensor, std::vector<ByteRange> ranges) {
  const std::uint64_t bytes = values_.tensors().at(tensor).byte_count();
  auto& known = needed_[group][tensor].ranges;
  for (const ByteRange& range : ranges) {
    known.push_back({std::min(range.begin, bytes), std::min(range.end, bytes)});
  }
  if (known.size() > ranges_max) join(known);
}

void SourceDigests::need_box(std::size_t group, const Box& box) {
  const auto& tensors = values_.tensors();
  if (box.decoding != no_decoding) {
    for (const std::uint32_t source : values_.decodings[box.decoding].sources) {
      add(group, source, {{0, tensors.at(source).byte_count()}});
    }
    return;
  }
  if (is_empty(box)) return add(group, box.source, {});
  const Encoding encoding = tensors.at(box.source).encoding;
  if (!encoding.is_dtype()) {
    return add(group, box.source, {{0, tensors[box.source].byte_count()}});
  }
  add(group, box.source, ranges_of(box, encoding.dtype()));
}

void SourceDigests::need(std::size_t group, const Value& value) {
  for_each_box(value, [&](const Box& box) { need_box(group, box); });
}

void SourceDigests::prepare() {
  for (std::size_t group = 0; group < needed_.size(); ++group) {
    for (auto& [tensor, needed] : needed_[group]) {
      join(needed.ranges);
      const TensorInfo& info = values_.tensors()[tensor];
      needed.item = table_.add(needed.ranges);
      places_[info.shard].push_back(
          {.begin = info.offset_begin, .end = info.offset_end, .item = needed.item});
    }
  }
  for (auto& places : places_) {
    std::ranges::sort(places, {}, &Place::begin);
    std::uint64_t end_max = 0;
    for (Place& place : places) place.end_max = end_max = std::max(end_max, place.end);
  }
}

void SourceDigests::hash(std::uint32_t shard, std::uint64_t begin,
                         std::span<const std::span<std::byte>> parts) {
  const std::vector<Place>& places = places_[shard];
  for (const std::span<std::byte> part : parts) {
    const std::uint64_t end = begin + part.size();
    auto place = std::ranges::lower_bound(places, end, {}, &Place::begin);
    while (place != places.begin() && std::prev(place)->end_max > begin) {
      --place;
      if (place->end <= begin) continue;
      const std::uint64_t first = std::max(begin, place->begin);
      const std::uint64_t last = std::min(end, place->end);
      table_.update(place->item, first - place->begin, part.subspan(first - begin, last - first));
    }
    begin = end;
  }
}

void SourceDigests::complete(std::size_t group) {
  for (const auto& [tensor, needed] : needed_[group]) {
    const TensorInfo& info = values_.tensors()[tensor];
    table_.complete(needed.item, [&](std::uint64_t begin, std::span<std::byte> to) {
      shards_.read(info, begin, to);
    });
  }
}

ReceiptFile SourceDigests::file_of(std::uint32_t number) {
  const Shard& shard = values_.catalog.shards()[number];
  ReceiptFile file = {.path = receipt_path(shard),
                      .checkpoint = checkpoint_of(values_.catalog, number),
                      .bytes = shard_bytes(values_.catalog, number)};
  if (shard.data_begin > 0) file.header_ranges.push_back({0, shard.data_begin});
  if (shard.tail_begin != 0 && shard.tail_begin < file.bytes) {
    file.header_ranges.push_back({shard.tail_begin, file.bytes});
  }
  file.header_digest =
      file_digest(table_.kind(), *shards_.sources()[number], 0, file.header_ranges);
  return file;
}

std::vector<ReceiptFile> SourceDigests::files(std::size_t group) {
  std::map<std::uint32_t, ReceiptFile> files;
  for (const auto& [tensor, needed] : needed_[group]) {
    const TensorInfo& info = values_.tensors()[tensor];
    auto file = files.find(info.shard);
    if (file == files.end()) file = files.emplace(info.shard, file_of(info.shard)).first;
    const std::vector<ByteRange>& ranges = needed.ranges;
    const bool is_whole = ranges.size() == 1 && ranges.front() == ByteRange{0, info.byte_count()};
    file->second.tensors.push_back(
        {.name = info.name,
         .encoding = std::string(info.encoding.name()),
         .shape = {info.shape.extents().begin(), info.shape.extents().end()},
         .begin = info.offset_begin,
         .end = info.offset_end,
         .ranges = is_whole ? std::vector<ByteRange>() : ranges,
         .digest = table_.digest(needed.item)});
  }
  std::vector<ReceiptFile> list;
  for (auto& [shard, file] : files) list.push_back(std::move(file));
  return list;
}

const std::string* SourceDigests::whole_digest(std::size_t group, std::uint32_t tensor) const {
  const auto found = needed_[group].find(tensor);
  if (found == needed_[group].end()) return nullptr;
  const std::uint64_t bytes = values_.tensors()[tensor].byte_count();
  if (found->second.ranges != std::vector<ByteRange>{{0, bytes}}) return nullptr;
  return &table_.digest(found->second.item);
}

const Box* whole_copy(const Plan& plan, const PlannedTarget& target) {
  return is_whole_source(plan, target) ? &target.recipe.boxes.front() : nullptr;
}

std::string recipe_word(const Plan& plan, const PlannedTarget& target) {
  const Recipe& recipe = target.recipe;
  if (recipe.origin != Origin::checkpoint) return std::string(name(recipe.origin));
  if (recipe.merge != nullptr) return "merge";
  const auto& tensors = plan.catalog->tensors();
  bool is_cast = false;
  for (const Box& box : recipe.boxes) {
    if (box.decoding != no_decoding) return "decode";
    is_cast = is_cast || tensors[box.source].encoding != Encoding(target.dtype);
  }
  if (is_cast) return "cast";
  return whole_copy(plan, target) != nullptr ? "copy" : "reorder";
}

std::vector<std::string> source_names(const Plan& plan, const PlannedTarget& target) {
  std::vector<std::string> names;
  for (const std::uint32_t source : sources_of(target.recipe, plan.decodings)) {
    names.push_back(plan.catalog->tensors()[source].name);
  }
  return names;
}

}  // namespace loadstone
