// Builds recipes step by step: records tensor operations without reading the tensors.
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

// Each function returns a Value, a handle of a tensor that is computed from sources. Operations do
// not change their arguments. A mismatch throws Error "plan.recipe" with found and expected. Not
// thread-safe.
class LOADSTONE_API RecipeBuilder {
 public:
  using Value = std::uint32_t;

  explicit RecipeBuilder(std::shared_ptr<const Catalog> catalog);
  RecipeBuilder(RecipeBuilder&& other) noexcept;
  RecipeBuilder& operator=(RecipeBuilder&& other) noexcept;
  ~RecipeBuilder();

  // Returns a whole tensor of the checkpoint, in its dtype.
  [[nodiscard]] Value source(std::string_view name);

  // Makes a constant from little-endian bytes. Only add() accepts the result. All constants
  // together have at most constant_bytes_max.
  [[nodiscard]] Value constant(std::span<const std::byte> bytes, const Shape& shape, Dtype dtype);

  // Applies a kernel to whole sources as the file stores them, see Decoding.
  [[nodiscard]] Value decode(std::string_view kernel, const std::vector<Value>& sources,
                             const Shape& shape, Dtype dtype, float offset = 0);

  // Returns the decoded value of a readable quantized tensor of the catalog, in F32, BF16 or F16.
  [[nodiscard]] Value numbers(const QuantizedTensor& quantized, Dtype dtype);

  // Casts a value. A load does only one cast, from source to target, so a second cast is rejected
  // unless the first is lossless. `is_count`: the value is a count, not codes, so I64 and bool may
  // become floats.
  [[nodiscard]] Value cast(Value value, Dtype dtype, bool is_count = false);
  // In all functions a negative dimension counts from the end.
  [[nodiscard]] Value transpose(Value value, std::int64_t dim_a, std::int64_t dim_b);
  [[nodiscard]] Value permute(Value value, const std::vector<std::int64_t>& order);
  // Selects `size` indices from `start`, `step` apart.
  [[nodiscard]] Value slice(Value value, std::int64_t dim, std::uint64_t start, std::uint64_t size,
                            std::uint64_t step = 1);
  [[nodiscard]] Value reshape(Value value, const Shape& shape);
  // All values must have the same dtype.
  [[nodiscard]] Value concat(const std::vector<Value>& values, std::int64_t dim);
  [[nodiscard]] Value stack(const std::vector<Value>& values, std::int64_t dim);

  [[nodiscard]] const Shape& shape(Value value) const;
  [[nodiscard]] Dtype dtype(Value value) const;

  // Sets the value of a target. May be called only once for each name.
  void add(std::string target, Value value);
  // Returns all recipes in the order of add() and leaves the builder empty.
  [[nodiscard]] Recipes finish();

 private:
  struct LOADSTONE_PRIVATE Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace loadstone
