#include "engine/value_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "base/text.h"
#include "boxes/cut.h"
#include "boxes/dims.h"
#include "codec/tensor_table.h"
#include "engine/box_read.h"
#include "engine/job_queue.h"
#include "engine/limits.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

[[noreturn]] void refuse_value(const std::string& value, const Problem& problem) {
  throw_problem("plan.box", problem, {.tensor = value});
}

}  // namespace

ValueReader::ValueReader(const Catalog& catalog,
                         std::span<const std::shared_ptr<ByteSource>> shards,
                         std::uint64_t staging_bytes_max, std::atomic<bool>& stop,
                         MemoryCount* memory, bool populates)
    : values_{.catalog = catalog, .list = std::vector<Value>(1)},
      context_{.values = values_,
               .places = place_,
               .shards = shards,
               .forms = {},
               .chunk_bytes = defaults::chunk_bytes,
               .slot_bytes = std::max(staging_bytes_max, reader_bytes_least),
               .memory = memory != nullptr ? *memory : own_count_,
               .stop = stop,
               .written = std::vector<std::atomic<std::uint64_t>>(1),
               .populates = populates},
      reader_(context_) {}

void ValueReader::open(const Value& value, std::span<const Decoding> decodings) {
  name_ = value.name;
  shape_ = *value.shape;
  values_.list.front() = {.name = name_, .shape = &shape_, .dtype = value.dtype};
  parts_.clear();
  const auto elements = shape_.numel();
  if (!elements || !Encoding(value.dtype).byte_count(*elements)) {
    refuse_value(name_, {"the size does not fit in 64 bits", shape_.text()});
  }
  elements_ = *elements;
  for (const Box& box : value.boxes) {
    if (!is_empty(box)) parts_.push_back({.box = box});
  }
  open_decodings(decodings);
  for (Part& part : parts_) {
    static_cast<void>(check_box(values_, values_[0], part.box));
    if (!order_to_cut(part.box)) refuse_value(name_, {"a box writes an element more than once"});
    part.begin = part.end = part.box.target_offset;
    for (const BoxDim& dim : part.box.dims) part.end += (dim.extent - 1) * dim.target_stride;
    ++part.end;
  }
  std::ranges::stable_sort(parts_, {}, &Part::begin);
}

// Opens only the decodings that the boxes need, because a checkpoint may have thousands.
void ValueReader::open_decodings(std::span<const Decoding> decodings) {
  decodings_.clear();
  forms_.clear();
  std::unordered_map<std::uint32_t, std::uint32_t> numbers;
  for (Part& part : parts_) {
    std::uint32_t& decoding = part.box.decoding;
    if (decoding == no_decoding) continue;
    if (decoding >= decodings.size()) {
      refuse_value(name_, {"the box's decoding does not exist", std::to_string(decoding),
                           "one of " + std::to_string(decodings.size())});
    }
    const auto [known, is_new] =
        numbers.emplace(decoding, static_cast<std::uint32_t>(decodings_.size()));
    if (is_new) {
      const Decoding& added = decodings_.emplace_back(decodings[decoding]);
      if (auto problem = check_decoding(values_.tensors(), added, forms_.emplace_back())) {
        refuse_value(name_, *problem);
      }
    }
    decoding = known->second;
  }
  values_.decodings = decodings_;
  context_.forms = forms_;
}

void ValueReader::read(std::uint64_t begin, std::uint64_t end, std::span<std::byte> to) {
  const auto refuse_range = [&](const char* message, std::string found, std::string expected) {
    throw Error("plan.box", message,
                {.path = values_.catalog.shown_path(),
                 .tensor = name_,
                 .found = std::move(found),
                 .expected = std::move(expected)});
  };
  if (begin > end || end > elements_) {
    refuse_range("the range of elements exceeds the tensor", fmt::format("{} to {}", begin, end),
                 fmt::format("a range within 0 to {}", elements_));
  }
  if (const auto bytes = Encoding(values_[0].dtype).byte_count(end - begin); bytes != to.size()) {
    refuse_range("the buffer and the range have different sizes", counted(to.size(), "byte"),
                 bytes ? counted(*bytes, "byte") : "a range of whole bytes");
  }
  boxes_.clear();
  for (const Part& part : parts_) {
    if (part.begin >= end) break;
    if (part.end > begin) cut_box(part.box, begin, end, boxes_);
  }
  if (boxes_.empty()) return;
  Value& value = values_.list.front();
  range_ = {end - begin};
  value.shape = &range_;
  value.boxes = boxes_;
  place_.front() = to.data();
  JobQueue queue(values_, place_, window_limits(context_.slot_bytes, context_.chunk_bytes));
  while (!context_.stop.load(std::memory_order_relaxed) && queue.next(job_)) reader_.run(job_);
}

}  // namespace loadstone
