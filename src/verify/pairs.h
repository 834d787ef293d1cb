// Finds corresponding values of two checkpoints with different names, layouts or encodings.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "boxes/decodings.h"
#include "loadstone/catalog.h"
#include "loadstone/quantized_tensors.h"
#include "loadstone/verify.h"

namespace loadstone {

// A value of one checkpoint: a tensor, a quantized tensor, or a value converted from tensors.
struct Side {
  TensorRecipe value;
  std::string encoding;  // "BF16", "nvfp4", "Q4_K"
  // Encoding of the codes, with one name for all layouts; empty for plain values.
  std::string codes{};
  std::vector<std::uint32_t> tensors{};  // tensors of the value, with all components

  [[nodiscard]] bool is_quantized() const noexcept { return !codes.empty(); }
};

struct Pair {
  std::string name;  // name in the second checkpoint
  Side first;
  Side second;
  // True if the values must be equal when both are read as `dtype`, which is the second value's
  // dtype if both are plain. Otherwise samples are compared with the tolerance of their codes.
  bool is_exact = false;
  // Relative difference that the rounding of scales explains, if only one side divides by them.
  double tolerance = 0;
  Dtype dtype = Dtype::f32;
};

// Pairs of corresponding values. The constructor is not thread-safe.
class Pairs {
 public:
  Pairs(const Catalog& first, const Catalog& second);

  // Returns true if the tensor is part of a pair, so it need not have a partner of the same name.
  [[nodiscard]] bool covers_first(std::uint32_t tensor) const { return in_first_[tensor]; }
  [[nodiscard]] bool covers_second(std::uint32_t tensor) const { return in_second_[tensor]; }
  [[nodiscard]] const std::vector<Pair>& all() const noexcept { return pairs_; }
  // Differences that headers reveal between values that a conversion rearranged.
  [[nodiscard]] const std::vector<Difference>& differences() const noexcept { return differences_; }

 private:
  // A value's tensor, and its quantized tensor if there is one.
  struct Named {
    const QuantizedTensor* stored = nullptr;
    std::uint32_t tensor = 0;
  };
  using Names = std::map<std::string_view, Named>;

  static Names names_of(const Catalog& catalog);
  static Side side_of(const Catalog& catalog, const Named& named);
  void add_named(const std::string& name, const Named& first, const Named& second);
  void add_layouts(const Names& first, const Names& second);
  void add_layout(const Recipes& layout, const Names& first, const Names& second);
  void keep(Pair pair);
  static void cover(const Side& side, std::vector<bool>& covered);

  const Catalog& first_;
  const Catalog& second_;
  std::vector<bool> in_first_;
  std::vector<bool> in_second_;
  std::vector<Pair> pairs_;
  std::vector<Difference> differences_;
};

}  // namespace loadstone
