#include "support/plans.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

namespace loadstone::test {

namespace {

Shape inserted(const Shape& shape, std::size_t dim, std::uint64_t extent) {
  auto extents = shape.extents();
  extents.insert(extents.begin() + static_cast<std::ptrdiff_t>(dim), extent);
  return Shape(extents);
}

Shape replaced(const Shape& shape, std::size_t dim, std::uint64_t extent) {
  auto extents = shape.extents();
  extents[dim] = extent;
  return Shape(extents);
}

}  // namespace

std::shared_ptr<const Catalog> fake_catalog(const std::vector<FakeTensor>& tensors,
                                            std::uint64_t data_begin) {
  Shard shard;
  shard.path = "/nowhere/model.safetensors";
  shard.relative_path = "model.safetensors";
  shard.header_digest = std::string(32, '0');
  shard.data_begin = data_begin;
  std::vector<TensorInfo> infos;
  std::uint64_t at = data_begin;
  for (const FakeTensor& tensor : tensors) {
    TensorInfo info;
    info.name = tensor.name;
    info.encoding = tensor.encoding;
    info.shape = tensor.shape;
    info.offset_begin = at;
    at += tensor.encoding.byte_count(tensor.shape.numel().value()).value();
    info.offset_end = at;
    infos.push_back(std::move(info));
  }
  shard.identity = {at, 1};
  return std::make_shared<const Catalog>("/nowhere", std::vector{shard}, std::move(infos),
                                         std::map<std::string, MetadataValue>(),
                                         std::vector<Finding>());
}

Target target_of(const std::string& name, Shape shape, Dtype dtype, TargetKind kind) {
  Target target;
  target.name = name;
  target.shape = std::move(shape);
  target.dtype = dtype;
  target.kind = kind;
  return target;
}

Skeleton skeleton_of(std::vector<Target> targets) {
  Skeleton skeleton;
  skeleton.targets = std::move(targets);
  return skeleton;
}

Plan plan_of_layers(const std::string& last, MissingPolicy missing) {
  std::vector<FakeTensor> sources;
  std::vector<Target> targets;
  for (int layer = 0; layer < 12; ++layer) {
    for (const char* part : {"q", "k"}) {
      const std::string name = fmt::format("layer.{}.{}.weight", layer, part);
      sources.push_back({name, {8, 8}, Dtype::bf16});
      targets.push_back(target_of(name, {8, 8}));
    }
  }
  targets.push_back(target_of(last, {2}));
  sources.push_back({"stranger", {3}});
  PlanOptions options;
  options.missing = missing;
  return make_plan(fake_catalog(sources), skeleton_of(targets), options);
}

std::vector<Finding> found(const Plan& plan, const std::string& code) {
  std::vector<Finding> findings;
  std::ranges::copy_if(plan.findings, std::back_inserter(findings),
                       [&](const Finding& finding) { return finding.code == code; });
  return findings;
}

const PlannedTarget& planned(const Plan& plan, const std::string& name) {
  const auto target = std::ranges::find(plan.targets, name, &PlannedTarget::name);
  if (target == plan.targets.end()) throw std::out_of_range(name);
  return *target;
}

Elements Elements::of_source(std::uint32_t source, const Shape& shape) {
  Elements elements = {shape, std::vector<std::uint64_t>(shape.numel().value())};
  std::iota(elements.ids.begin(), elements.ids.end(), std::uint64_t{source} << 32);
  return elements;
}

Elements Elements::make(const Shape& shape, const std::function<std::uint64_t(const Index&)>& id) {
  Elements elements = {shape, {}};
  const std::uint64_t count = shape.numel().value();
  for (std::uint64_t i = 0; i < count; ++i) {
    Index index(shape.rank());
    std::uint64_t rest = i;
    for (std::size_t d = shape.rank(); d-- > 0;) {
      index[d] = rest % shape[d];
      rest /= shape[d];
    }
    elements.ids.push_back(id(index));
  }
  return elements;
}

std::uint64_t Elements::at(const Index& index) const {
  std::uint64_t position = 0;
  for (std::size_t d = 0; d < shape.rank(); ++d) position = position * shape[d] + index[d];
  return ids.at(position);
}

Elements Elements::permuted(const std::vector<std::size_t>& order) const {
  std::vector<std::uint64_t> extents;
  for (const std::size_t dim : order) extents.push_back(shape[dim]);
  return make(Shape(extents), [&](const Index& index) {
    Index from(index.size());
    for (std::size_t d = 0; d < order.size(); ++d) from[order[d]] = index[d];
    return at(from);
  });
}

Elements Elements::sliced(std::size_t dim, std::uint64_t start, std::uint64_t size) const {
  return make(replaced(shape, dim, size), [&](Index index) {
    index[dim] += start;
    return at(index);
  });
}

Elements Elements::concat(const std::vector<Elements>& parts, std::size_t dim) {
  std::uint64_t extent = 0;
  for (const Elements& part : parts) extent += part.shape[dim];
  return make(replaced(parts.front().shape, dim, extent), [&](Index index) {
    std::size_t part = 0;
    for (; index[dim] >= parts[part].shape[dim]; ++part) index[dim] -= parts[part].shape[dim];
    return parts[part].at(index);
  });
}

Elements Elements::stack(const std::vector<Elements>& parts, std::size_t dim) {
  return make(inserted(parts.front().shape, dim, parts.size()), [&](Index index) {
    const Elements& part = parts[index[dim]];
    index.erase(index.begin() + static_cast<std::ptrdiff_t>(dim));
    return part.at(index);
  });
}

Elements written(const std::vector<Box>& boxes, const Shape& shape) {
  Elements elements = {shape, std::vector<std::uint64_t>(shape.numel().value(), UINT64_MAX)};
  for (const Box& box : boxes) {
    const std::function<void(std::size_t, std::uint64_t, std::uint64_t)> walk =
        [&](std::size_t dim, std::uint64_t source, std::uint64_t target) {
          if (dim == box.dims.size()) {
            std::uint64_t& id = elements.ids.at(target);
            id = id == UINT64_MAX ? (std::uint64_t{box.source} << 32) + source : UINT64_MAX - 1;
            return;
          }
          const BoxDim& d = box.dims[dim];
          for (std::uint64_t i = 0; i < d.extent; ++i) {
            walk(dim + 1, source + i * d.source_stride, target + i * d.target_stride);
          }
        };
    walk(0, box.source_offset, box.target_offset);
  }
  return elements;
}

}  // namespace loadstone::test
