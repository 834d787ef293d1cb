// Declares catalogs without files for tests, and functions that evaluate plans element by element.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "loadstone/plan.h"

namespace loadstone::test {

struct FakeTensor {
  std::string name;
  Shape shape;
  Encoding encoding = Dtype::f32;
};

// Returns a catalog of one shard with these tensors in sequence. The shard's file does not exist.
[[nodiscard]] std::shared_ptr<const Catalog> fake_catalog(const std::vector<FakeTensor>& tensors,
                                                          std::uint64_t data_begin = 64);

[[nodiscard]] Target target_of(const std::string& name, Shape shape, Dtype dtype = Dtype::f32,
                               TargetKind kind = TargetKind::parameter);
[[nodiscard]] Skeleton skeleton_of(std::vector<Target> targets);

// Returns a plan with "layer.N.q.weight" and "layer.N.k.weight" for twelve layers, a missing tensor
// named `last`, and an unexpected tensor "stranger".
[[nodiscard]] Plan plan_of_layers(const std::string& last,
                                  MissingPolicy missing = MissingPolicy::zeros);

// Returns the plan's findings with this code.
[[nodiscard]] std::vector<Finding> found(const Plan& plan, const std::string& code);
[[nodiscard]] const PlannedTarget& planned(const Plan& plan, const std::string& name);

// A tensor whose elements encode their origin as source * 2^32 + element. All operations are plain
// loops over indices.
struct Elements {
  Shape shape;
  std::vector<std::uint64_t> ids;

  using Index = std::vector<std::uint64_t>;

  [[nodiscard]] static Elements of_source(std::uint32_t source, const Shape& shape);
  // Sets each element of `shape` to `id` of its index.
  [[nodiscard]] static Elements make(const Shape& shape,
                                     const std::function<std::uint64_t(const Index&)>& id);
  [[nodiscard]] std::uint64_t at(const Index& index) const;

  [[nodiscard]] Elements permuted(const std::vector<std::size_t>& order) const;
  [[nodiscard]] Elements sliced(std::size_t dim, std::uint64_t start, std::uint64_t size) const;
  [[nodiscard]] Elements reshaped(const Shape& new_shape) const { return {new_shape, ids}; }
  [[nodiscard]] static Elements concat(const std::vector<Elements>& parts, std::size_t dim);
  [[nodiscard]] static Elements stack(const std::vector<Elements>& parts, std::size_t dim);

  friend bool operator==(const Elements&, const Elements&) = default;
};

// Returns the elements that the boxes write to a tensor of this shape. Elements that are not
// written are UINT64_MAX, elements that are written twice are UINT64_MAX - 1.
[[nodiscard]] Elements written(const std::vector<Box>& boxes, const Shape& shape);

}  // namespace loadstone::test
