// The tensors of joined checkpoints as merges see them: numbers, whatever they are kept as.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "boxes/view.h"
#include "loadstone/catalog.h"
#include "loadstone/finding.h"
#include "loadstone/recipe.h"

namespace loadstone {

// A tensor by the name that a model knows it by.
struct MergeSource {
  std::uint32_t tensor = 0;  // the data, where it is quantized
  Shape shape;
  Dtype dtype = Dtype::f32;  // in the file; F32 of what is decoded, BF16 of FP8 without scales
  bool is_decoded = false;
  bool is_number = false;  // a float, or decoded
};

// Whether merges compute with numbers of this dtype.
[[nodiscard]] bool is_merged_dtype(Dtype dtype) noexcept;

using MergeSources = std::map<std::string, MergeSource, std::less<>>;

// Not thread-safe.
class MergeNumbers {
 public:
  explicit MergeNumbers(std::shared_ptr<const Catalog> catalog) : catalog_(std::move(catalog)) {}

  // Those of one checkpoint. What cannot be decoded is added to `findings`.
  [[nodiscard]] MergeSources sources(std::uint32_t checkpoint,
                                     std::vector<Finding>& findings) const;
  [[nodiscard]] View view(const MergeSource& source) const;
  // Of a view that was made of the source's.
  [[nodiscard]] std::vector<Box> boxes(const MergeSource& source, const View& view);
  [[nodiscard]] std::vector<Box> boxes(const MergeSource& source) {
    return boxes(source, view(source));
  }
  // All that boxes count on; none of them is left here.
  [[nodiscard]] std::vector<Decoding> take_decodings() { return std::move(decodings_); }

 private:
  std::shared_ptr<const Catalog> catalog_;
  std::vector<Decoding> decodings_;
  std::map<std::uint32_t, std::uint32_t> known_;  // by tensor
};

}  // namespace loadstone
