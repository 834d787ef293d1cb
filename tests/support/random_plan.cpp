#include "support/random_plan.h"

#include <algorithm>
#include <array>
#include <utility>

#include "kernels/cast.h"

namespace loadstone::testing {

namespace {

constexpr std::array dtypes = {Dtype::u8,  Dtype::bf16, Dtype::f32,
                               Dtype::f64, Dtype::c64,  Dtype::c128};

// A region of a target: its start and extent in each dimension.
struct Part {
  std::vector<std::uint64_t> begin;
  std::vector<std::uint64_t> extent;
};

// Not thread-safe.
class Generator {
 public:
  explicit Generator(std::mt19937_64& random) : random_(random) {}

  std::uint64_t below(std::uint64_t bound) { return random_() % bound; }
  bool chance(unsigned percent) { return below(100) < percent; }

  std::vector<std::uint64_t> shape() {
    static constexpr std::array<std::uint64_t, 8> extents = {1, 2, 3, 5, 8, 17, 40, 64};
    std::vector<std::uint64_t> shape(below(4));
    for (auto& extent : shape) extent = extents[below(extents.size())];
    if (!shape.empty() && chance(40)) shape.back() = 1000 + below(9000);  // long runs
    return shape;
  }

  // Cuts the region recursively into smaller regions.
  std::vector<Part> cut(const std::vector<std::uint64_t>& shape) {
    std::vector<Part> parts = {{std::vector<std::uint64_t>(shape.size(), 0), shape}};
    for (std::uint64_t cuts = shape.empty() ? 0 : below(6); cuts > 0; --cuts) {
      Part& part = parts[below(parts.size())];
      const std::size_t dim = below(shape.size());
      if (part.extent[dim] < 2) continue;
      const std::uint64_t first = 1 + below(part.extent[dim] - 1);
      Part rest = part;
      rest.begin[dim] += first;
      rest.extent[dim] -= first;
      part.extent[dim] = first;
      parts.push_back(rest);
    }
    std::ranges::shuffle(parts, random_);
    return parts;
  }

  // Adds a source that contains the region, with its dimensions in any order and unused space
  // around it. Returns the box from the source to the target.
  Box place(PlanBuilder& builder, Dtype dtype, const std::vector<std::uint64_t>& shape,
            const Part& part) {
    const std::size_t rank = shape.size();
    std::vector<std::size_t> order(rank);
    for (std::size_t i = 0; i < rank; ++i) order[i] = i;
    if (chance(50)) std::ranges::shuffle(order, random_);
    Box box;
    box.dims.resize(rank);
    std::uint64_t target_stride = 1;
    for (std::size_t i = rank; i-- > 0;) {
      box.dims[i].extent = part.extent[i];
      box.dims[i].target_stride = target_stride;
      box.target_offset += part.begin[i] * target_stride;
      target_stride *= shape[i];
    }
    std::uint64_t source_stride = 1;
    for (const std::size_t i : order) {
      if (chance(5)) continue;  // stride 0 reads the same element at each step
      const std::uint64_t step = chance(20) ? 2 : 1;
      const std::uint64_t before = chance(30) ? below(4) : 0;
      std::uint64_t after = chance(30) ? below(4) : 0;
      if (chance(5)) after += 70000;
      box.dims[i].source_stride = source_stride * step;
      box.source_offset += before * source_stride;
      source_stride *= before + (part.extent[i] - 1) * step + 1 + after;
      if (source_stride > (4u << 20)) return {};  // the source would be too large for a test
    }
    box.source = source(builder, dtype, source_stride);
    return box;
  }

 private:
  // Reuses an earlier source if it is large enough, so that several boxes share its bytes.
  std::uint32_t source(PlanBuilder& builder, Dtype dtype, std::uint64_t elements) {
    for (const auto& [known, size] : sources_) {
      if (size >= elements && builder.tensor(known).encoding == Encoding(dtype) && chance(40)) {
        return known;
      }
    }
    if (chance(10)) builder.add_shard();
    const auto bytes = *Encoding(dtype).byte_count(elements);
    const std::uint32_t made =
        builder.add_tensor("s" + std::to_string(sources_.size()), dtype, {elements},
                           pattern(bytes, sources_.size()), below(5));
    sources_.emplace_back(made, elements);
    return made;
  }

  std::mt19937_64& random_;
  std::vector<std::pair<std::uint32_t, std::uint64_t>> sources_;
};

}  // namespace

Plan random_plan(std::mt19937_64& random, PlanBuilder& builder) {
  Generator generator(random);
  for (std::uint64_t targets = 1 + generator.below(6); targets > 0; --targets) {
    const std::vector<std::uint64_t> shape = generator.shape();
    const Dtype source = dtypes[generator.below(dtypes.size())];
    Dtype target = generator.chance(50) ? source : dtypes[generator.below(dtypes.size())];
    if (!can_cast(source, target)) target = source;
    std::vector<Box> boxes;
    bool small = true;
    for (const Part& part : generator.cut(shape)) {
      boxes.push_back(generator.place(builder, source, shape, part));
      small = small && (boxes.back().dims.size() == shape.size());
    }
    if (small) builder.add_target("t" + std::to_string(targets), target, Shape(shape), boxes);
  }
  return builder.build();
}

}  // namespace loadstone::testing
