// Provides the decoded values of joined checkpoints to merges, for any encoding.
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

// A tensor that a merge reads, listed under its name in the model.
struct MergeSource {
  std::uint32_t tensor = 0;  // the codes, if the tensor is quantized
  Shape shape;
  Dtype dtype = Dtype::f32;  // dtype in the file; F32 if decoded, BF16 for FP8 without scales
  bool is_decoded = false;
  bool is_number = false;  // is floating-point, or decoded to floats
};

// Returns true if merges can compute with values of this dtype.
[[nodiscard]] bool is_merged_dtype(Dtype dtype) noexcept;

using MergeSources = std::map<std::string, MergeSource, std::less<>>;

// Not thread-safe.
class MergeNumbers {
 public:
  explicit MergeNumbers(std::shared_ptr<const Catalog> catalog) : catalog_(std::move(catalog)) {}

  // Returns the tensors of one checkpoint. Adds a finding for each tensor that cannot be decoded.
  [[nodiscard]] MergeSources sources(std::uint32_t checkpoint,
                                     std::vector<Finding>& findings) const;
  [[nodiscard]] View view(const MergeSource& source) const;
  // Returns the boxes that copy a view of the source.
  [[nodiscard]] std::vector<Box> boxes(const MergeSource& source, const View& view);
  [[nodiscard]] std::vector<Box> boxes(const MergeSource& source) {
    return boxes(source, view(source));
  }
  // Moves out the decodings that the boxes use.
  [[nodiscard]] std::vector<Decoding> take_decodings() { return std::move(decodings_); }

 private:
  std::shared_ptr<const Catalog> catalog_;
  std::vector<Decoding> decodings_;
  std::map<std::uint32_t, std::uint32_t> known_;  // by tensor
};

}  // namespace loadstone
