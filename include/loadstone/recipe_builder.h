// Recipes made step by step, with the operations of a tensor library on tensors that are not read.
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

// Values are numbers that stand for tensors made of sources. Operations leave their arguments as
// they are. What does not fit is Error "plan.recipe" with what was found and what was expected.
// Not thread-safe.
class LOADSTONE_API RecipeBuilder {
 public:
  using Value = std::uint32_t;

  explicit RecipeBuilder(std::shared_ptr<const Catalog> catalog);
  RecipeBuilder(RecipeBuilder&& other) noexcept;
  RecipeBuilder& operator=(RecipeBuilder&& other) noexcept;
  ~RecipeBuilder();

  // A whole tensor of the checkpoint, in its dtype.
  [[nodiscard]] Value source(std::string_view name);

  // Little-endian bytes. It can be added as it is and nothing else; all of them together have at
  // most constant_bytes_max.
  [[nodiscard]] Value constant(std::span<const std::byte> bytes, const Shape& shape, Dtype dtype);

  // What a kernel makes of whole sources, as they are in the file: see Decoding.
  [[nodiscard]] Value decode(std::string_view kernel, const std::vector<Value>& sources,
                             const Shape& shape, Dtype dtype, float offset = 0);

  // The numbers of one of the catalog's quantized tensors, which is readable: F32, BF16 or F16.
  [[nodiscard]] Value numbers(const QuantizedTensor& quantized, Dtype dtype);

  // One cast is done on the way, from the source to what the target is; so a second one is refused
  // unless the first loses nothing. `is_count`: I64 and bool, which hold no codes, may become
  // floats.
  [[nodiscard]] Value cast(Value value, Dtype dtype, bool is_count = false);
  // Dimensions may be negative, counted from the end.
  [[nodiscard]] Value transpose(Value value, std::int64_t dim_a, std::int64_t dim_b);
  [[nodiscard]] Value permute(Value value, const std::vector<std::int64_t>& order);
  // `size` indices from `start` on, `step` apart.
  [[nodiscard]] Value slice(Value value, std::int64_t dim, std::uint64_t start, std::uint64_t size,
                            std::uint64_t step = 1);
  [[nodiscard]] Value reshape(Value value, const Shape& shape);
  // All values have one dtype.
  [[nodiscard]] Value concat(const std::vector<Value>& values, std::int64_t dim);
  [[nodiscard]] Value stack(const std::vector<Value>& values, std::int64_t dim);

  [[nodiscard]] const Shape& shape(Value value) const;
  [[nodiscard]] Dtype dtype(Value value) const;

  // What the target is made of. A target is named once.
  void add(std::string target, Value value);
  // All that was added, in this order; the builder then has no targets.
  [[nodiscard]] Recipes finish();

 private:
  struct LOADSTONE_PRIVATE Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace loadstone
