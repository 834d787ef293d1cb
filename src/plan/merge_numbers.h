// The tensors of joined checkpoints for merges: decoded values, in any encoding.
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

// A tensor under its name in the model.
struct MergeSource {
  std::uint32_t tensor = 0;  // the codes, if it is quantized
  Shape shape;
  Dtype dtype = Dtype::f32;  // in the file; F32 if decoded, BF16 for FP8 without scales
  bool is_decoded = false;
  bool is_number = false;  // a float, or decoded
};

// Returns true if merges can compute with this dtype.
[[nodiscard]] bool is_merged_dtype(Dtype dtype) noexcept;

using MergeSources = std::map<std::string, MergeSource, std::less<>>;

// Not thread-safe.
class MergeNumbers {
 public:
  explicit MergeNumbers(std::shared_ptr<const Catalog> catalog) : catalog_(std::move(catalog)) {}

  // Returns the tensors of one checkpoint. Adds findings for those that cannot be decoded.
  [[nodiscard]] MergeSources sources(std::uint32_t checkpoint,
                                     std::vector<Finding>& findings) const;
  [[nodiscard]] View view(const MergeSource& source) const;
  // Returns the boxes of a view of the source.
  [[nodiscard]] std::vector<Box> boxes(const MergeSource& source, const View& view);
  [[nodiscard]] std::vector<Box> boxes(const MergeSource& source) {
    return boxes(source, view(source));
  }
  // Returns all decodings of the boxes, and keeps none.
  [[nodiscard]] std::vector<Decoding> take_decodings() { return std::move(decodings_); }

 private:
  std::shared_ptr<const Catalog> catalog_;
  std::vector<Decoding> decodings_;
  std::map<std::uint32_t, std::uint32_t> known_;  // by tensor
};

}  // namespace loadstone
