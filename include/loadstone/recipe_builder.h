// Builds recipes step by step, with tensor operations on tensors that are not read.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/export.h"
#include "loadstone/quantized_tensors.h"
#include "loadstone/recipe.h"

namespace loadstone {

// Values are handles of tensors made from sources. Operations do not change their arguments.
// Mismatches throw Error "plan.recipe" with found and expected. Not thread-safe.
class LOADSTONE_API RecipeBuilder {
 public:
  using Value = std::uint32_t;

  explicit RecipeBuilder(std::shared_ptr<const Catalog> catalog);
  RecipeBuilder(RecipeBuilder&& other) noexcept;
  RecipeBuilder& operator=(RecipeBuilder&& other) noexcept;
  ~RecipeBuilder();

  // A whole tensor of the checkpoint, in its dtype.
  [[nodiscard]] Value source(std::string_view name);

  // Little-endian bytes. Only add() accepts the result; all constants together have at most
  // constant_bytes_max.
  [[nodiscard]] Value constant(std::span<const std::byte> bytes, const Shape& shape, Dtype dtype);

  // The result of a kernel on whole sources, as stored in the file: see Decoding.
  [[nodiscard]] Value decode(std::string_view kernel, const std::vector<Value>& sources,
                             const Shape& shape, Dtype dtype, float offset = 0);

  // The decoded value of a readable quantized tensor of the catalog: F32, BF16 or F16.
  [[nodiscard]] Value numbers(const QuantizedTensor& quantized, Dtype dtype);

  // A load does one cast, from source to target, so a second one is rejected unless the first is
  // lossless. `is_count`: I64 and bool, which are not codes, may become floats.
  [[nodiscard]] Value cast(Value value, Dtype dtype, bool is_count = false);
  // Dimensions may be negative, counted from the end.
  [[nodiscard]] Value transpose(Value value, std::int64_t dim_a, std::int64_t dim_b);
  [[nodiscard]] Value permute(Value value, const std::vector<std::int64_t>& order);
  // `size` indices from `start`, `step` apart.
  [[nodiscard]] Value slice(Value value, std::int64_t dim, std::uint64_t start, std::uint64_t size,
                            std::uint64_t step = 1);
  [[nodiscard]] Value reshape(Value value, const Shape& shape);
  // All values must have the same dtype.
  [[nodiscard]] Value concat(const std::vector<Value>& values, std::int64_t dim);
  [[nodiscard]] Value stack(const std::vector<Value>& values, std::int64_t dim);

  [[nodiscard]] const Shape& shape(Value value) const;
  [[nodiscard]] Dtype dtype(Value value) const;

  // Sets the value of a target, once for each name.
  void add(std::string target, Value value);
  // Returns all added recipes in this order and leaves the builder empty.
  [[nodiscard]] Recipes finish();

 private:
  struct LOADSTONE_PRIVATE Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace loadstone
