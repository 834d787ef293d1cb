#include "engine/value_reader.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "boxes/cut.h"
#include "boxes/dims.h"
#include "codec/tensor_table.h"
#include "engine/job_queue.h"
#include "loadstone/error.h"
#include "plan/budget.h"
#include "plan/decodings.h"

namespace loadstone {

namespace {

[[noreturn]] void refuse_value(const std::string& value, std::string message,
                               std::string found = {}, std::string expected = {}) {
  Where where;
  where.tensor = value;
  where.found = std::move(found);
  where.expected = std::move(expected);
  throw Error("plan.box", std::move(message), std::move(where));
}

}  // namespace

ValueReader::ValueReader(std::shared_ptr<const Catalog> catalog,
                         std::span<const std::shared_ptr<ByteSource>> shards,
                         std::uint64_t staging_bytes_max, std::atomic<bool>& stop,
                         MemoryCount* memory, bool populates, SourceDigests* digests)
    : slot_bytes_(std::max(staging_bytes_max, reader_bytes_least)),
      context_{.plan = plan_,
               .targets = target_,
               .shards = shards,
               .forms = {},
               .chunk_bytes = defaults::chunk_bytes,
               .slot_bytes = slot_bytes_,
               .memory = memory != nullptr ? *memory : own_count_,
               .stop = stop,
               .written = std::vector<std::atomic<std::uint64_t>>(1),
               .populates = populates,
               .digests = digests},
      reader_(context_) {
  plan_.catalog = std::move(catalog);
  plan_.targets.resize(1);
}

void ValueReader::open(const Value& value) {
  whole_.name = value.name;
  whole_.shape = value.shape;
  whole_.dtype = value.dtype;
  parts_.clear();
  const auto elements = value.shape.numel();
  if (!elements || !Encoding(value.dtype).byte_count(*elements)) {
    refuse_value(value.name, "the size does not fit 64 bits", value.shape.text());
  }
  elements_ = *elements;
  for (const Box& box : value.boxes) {
    if (!is_empty(box)) parts_.push_back({.box = box});
  }
  open_decodings(value);
  for (Part& part : parts_) {
    static_cast<void>(check_box(plan_, whole_, part.box));
    if (!order_to_cut(part.box)) refuse_value(value.name, "a box writes an element more than once");
    part.begin = part.end = part.box.target_offset;
    for (const BoxDim& dim : part.box.dims) part.end += (dim.extent - 1) * dim.target_stride;
    ++part.end;
  }
  std::ranges::stable_sort(parts_, {}, &Part::begin);
}

// Those that the boxes need, and no others: a checkpoint may have thousands.
void ValueReader::open_decodings(const Value& value) {
  plan_.decodings.clear();
  forms_.clear();
  std::unordered_map<std::uint32_t, std::uint32_t> numbers;
  for (Part& part : parts_) {
    std::uint32_t& decoding = part.box.decoding;
    if (decoding == no_decoding) continue;
    if (decoding >= value.decodings.size()) {
      refuse_value(value.name, "the box's decoding does not exist", std::to_string(decoding),
                   "one of " + std::to_string(value.decodings.size()));
    }
    const auto [known, is_new] =
        numbers.emplace(decoding, static_cast<std::uint32_t>(plan_.decodings.size()));
    if (is_new) {
      const Decoding& added = plan_.decodings.emplace_back(value.decodings[decoding]);
      auto problem = check_decoding(plan_.catalog->tensors(), added, forms_.emplace_back());
      if (problem) {
        refuse_value(value.name, std::move(problem->message), std::move(problem->found),
                     std::move(problem->expected));
      }
    }
    decoding = known->second;
  }
  context_.forms = forms_;
}

void ValueReader::read(std::uint64_t begin, std::uint64_t end, std::span<std::byte> to) {
  if (begin > end || end > elements_) {
    refuse_value(whole_.name, "the range leaves the value",
                 std::to_string(begin) + " to " + std::to_string(end),
                 "at most " + std::to_string(elements_));
  }
  if (Encoding(whole_.dtype).byte_count(end - begin) != to.size()) {
    refuse_value(whole_.name, "the buffer is not as large as the range",
                 std::to_string(to.size()) + " bytes");
  }
  PlannedTarget& target = plan_.targets.front();
  target.name = whole_.name;
  target.dtype = whole_.dtype;
  target.shape = {end - begin};
  target.recipe.origin = Origin::checkpoint;
  target.recipe.boxes.clear();
  for (const Part& part : parts_) {
    if (part.begin >= end) break;
    if (part.end > begin) cut_box(part.box, begin, end, target.recipe.boxes);
  }
  if (target.recipe.boxes.empty()) return;
  target_.front() = to.data();
  JobQueue queue(plan_, target_, window_limits(slot_bytes_, defaults::chunk_bytes));
  while (!context_.stop.load(std::memory_order_relaxed) && queue.next(job_)) reader_.run(job_);
}

}  // namespace loadstone
