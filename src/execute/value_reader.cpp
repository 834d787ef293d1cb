#include "execute/value_reader.h"

#include <algorithm>
#include <functional>
#include <unordered_map>
#include <utility>

#include "execute/job_queue.h"
#include "loadstone/error.h"
#include "plan/costs.h"
#include "plan/decodings.h"

namespace loadstone {

namespace {

[[noreturn]] void refuse(const std::string& value, std::string message, std::string found = {},
                         std::string expected = {}) {
  Where where;
  where.tensor = value;
  where.found = std::move(found);
  where.expected = std::move(expected);
  throw Error("plan.box", std::move(message), std::move(where));
}

// How many steps from `start` on are below `bound`, at most all.
std::uint64_t steps_until(std::uint64_t bound, std::uint64_t start, const BoxDim& dim) {
  if (start >= bound) return 0;
  return std::min(dim.extent, (bound - start - 1) / dim.target_stride + 1);
}

// Takes a box apart at the ends of a range. Where dimensions nest, as those of views do, at most
// two parts for each of them are left over.
class Cutter {
 public:
  Cutter(const Box& box, std::uint64_t begin, std::uint64_t end, std::vector<Box>& kept)
      : box_(box), begin_(begin), end_(end), kept_(kept), spans_(box.dims.size() + 1, 0) {
    for (std::size_t i = box.dims.size(); i-- > 0;) {
      spans_[i] = spans_[i + 1] + (box.dims[i].extent - 1) * box.dims[i].target_stride;
    }
  }

  // All of the dimensions from `level` on, from these offsets.
  void cut(std::size_t level, std::uint64_t source, std::uint64_t target) {
    const std::uint64_t last = target + spans_[level];
    if (last < begin_ || target >= end_) return;
    if (target >= begin_ && last < end_) {
      keep(level, box_.dims.size() == level ? 1 : box_.dims[level].extent, source, target);
      return;
    }
    const BoxDim& dim = box_.dims[level];
    const std::uint64_t inner = spans_[level + 1];
    // Steps [touched_begin, touched_end) have something inside, [whole_begin, whole_end) nothing
    // else.
    const std::uint64_t touched_begin = steps_until(begin_, target + inner, dim);
    const std::uint64_t touched_end = steps_until(end_, target, dim);
    const std::uint64_t whole_begin = std::min(steps_until(begin_, target, dim), touched_end);
    const std::uint64_t whole_end = std::max(steps_until(end_, target + inner, dim), whole_begin);
    const auto step = [&](std::uint64_t i) {
      cut(level + 1, source + i * dim.source_stride, target + i * dim.target_stride);
    };
    for (std::uint64_t i = touched_begin; i < whole_begin; ++i) step(i);
    if (whole_begin < whole_end) {
      keep(level, whole_end - whole_begin, source + whole_begin * dim.source_stride,
           target + whole_begin * dim.target_stride);
    }
    for (std::uint64_t i = whole_end; i < touched_end; ++i) step(i);
  }

 private:
  void keep(std::size_t level, std::uint64_t extent, std::uint64_t source, std::uint64_t target) {
    Box& box = kept_.emplace_back();
    box.source = box_.source;
    box.decoding = box_.decoding;
    box.source_offset = source;
    box.target_offset = target - begin_;
    box.dims.assign(box_.dims.begin() + static_cast<std::ptrdiff_t>(level), box_.dims.end());
    if (!box.dims.empty()) box.dims.front().extent = extent;
  }

  const Box& box_;
  std::uint64_t begin_;
  std::uint64_t end_;
  std::vector<Box>& kept_;
  std::vector<std::uint64_t> spans_;  // from the first to the last element, by level
};

}  // namespace

void cut_box(const Box& box, std::uint64_t begin, std::uint64_t end, std::vector<Box>& cut) {
  Cutter(box, begin, end, cut).cut(0, box.source_offset, box.target_offset);
}

ValueReader::ValueReader(std::shared_ptr<const Catalog> catalog,
                         std::span<const std::shared_ptr<ByteSource>> shards,
                         std::uint64_t staging_bytes_max, std::atomic<bool>& stop)
    : slot_bytes_(std::max(staging_bytes_max, reader_bytes_least)),
      staging_(slot_bytes_),
      context_{.plan = plan_,
               .targets = target_,
               .shards = shards,
               .forms = {},
               .chunk_bytes = defaults::chunk_bytes,
               .decoded_bytes = window_limits(slot_bytes_, defaults::chunk_bytes).decoded_bytes,
               .staging = staging_,
               .stop = stop,
               .written = std::vector<std::atomic<std::uint64_t>>(1)},
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
    refuse(value.name, "the size does not fit 64 bits", value.shape.text());
  }
  elements_ = *elements;
  for (const Box& box : value.boxes) {
    if (!is_empty(box)) parts_.push_back({.box = box});
  }
  open_decodings(value);
  for (Part& part : parts_) {
    static_cast<void>(check_box(plan_, whole_, part.box));
    std::erase_if(part.box.dims, [](const BoxDim& dim) { return dim.extent == 1; });
    std::ranges::stable_sort(part.box.dims, std::greater<>(), &BoxDim::target_stride);
    part.begin = part.end = part.box.target_offset;
    for (const BoxDim& dim : part.box.dims) {
      if (dim.target_stride == 0) refuse(value.name, "a box writes an element more than once");
      part.end += (dim.extent - 1) * dim.target_stride;
    }
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
      refuse(value.name, "the box's decoding does not exist", std::to_string(decoding),
             "one of " + std::to_string(value.decodings.size()));
    }
    const auto [known, is_new] =
        numbers.emplace(decoding, static_cast<std::uint32_t>(plan_.decodings.size()));
    if (is_new) {
      const Decoding& added = plan_.decodings.emplace_back(value.decodings[decoding]);
      auto problem = check_decoding(plan_.catalog->tensors(), added, forms_.emplace_back());
      if (problem) {
        refuse(value.name, std::move(problem->message), std::move(problem->found),
               std::move(problem->expected));
      }
    }
    decoding = known->second;
  }
  context_.forms = forms_;
}

void ValueReader::read(std::uint64_t begin, std::uint64_t end, std::span<std::byte> to) {
  if (begin > end || end > elements_) {
    refuse(whole_.name, "the range leaves the value",
           std::to_string(begin) + " to " + std::to_string(end),
           "at most " + std::to_string(elements_));
  }
  if (Encoding(whole_.dtype).byte_count(end - begin) != to.size()) {
    refuse(whole_.name, "the buffer is not as large as the range",
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
