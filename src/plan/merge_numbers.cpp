#include "plan/merge_numbers.h"

#include <set>

#include "boxes/decodings.h"
#include "loadstone/quantized_tensors.h"

namespace loadstone {

bool is_merged_dtype(Dtype dtype) noexcept {
  return dtype == Dtype::f64 || dtype == Dtype::f32 || dtype == Dtype::f16 || dtype == Dtype::bf16;
}

MergeSources MergeNumbers::sources(std::uint32_t checkpoint, std::vector<Finding>& findings) const {
  const QuantizedTensors& quantized = catalog_->quantized();
  const auto [begin, end] = catalog_->tensors_of(checkpoint);
  std::set<std::uint32_t> unneeded;
  for (const QuantizedTensor& each : quantized.tensors()) {
    unneeded.insert(each.unneeded.begin(), each.unneeded.end());
  }
  MergeSources sources;
  for (std::uint32_t i = begin; i < end; ++i) {
    const TensorInfo& tensor = catalog_->tensors()[i];
    const QuantizedTensor* const codes = quantized.find(i);
    if (codes == nullptr && (quantized.is_companion(i) || unneeded.contains(i))) continue;
    MergeSource source = {.tensor = i, .shape = tensor.shape};
    if (codes != nullptr && !codes->is_readable()) {
      findings.push_back(codes->defect);
      continue;
    }
    source.is_decoded = codes != nullptr || !tensor.encoding.is_dtype();
    if (codes != nullptr) source.shape = codes->shape();
    if (is_plain_fp8(*catalog_, i)) {
      source.dtype = Dtype::bf16;  // BF16 represents all FP8 values
    } else if (!source.is_decoded) {
      source.dtype = tensor.encoding.dtype();
    }
    source.is_number = source.is_decoded || is_merged_dtype(source.dtype);
    sources.emplace(codes != nullptr ? codes->name : tensor.name, std::move(source));
  }
  return sources;
}

View MergeNumbers::view(const MergeSource& source) const {
  return source.is_decoded ? numbers_view(*catalog_, source.tensor, source.tensor)
                           : source_view(source.tensor, catalog_->tensors()[source.tensor]);
}

std::vector<Box> MergeNumbers::boxes(const MergeSource& source, const View& view) {
  std::vector<Box> boxes = boxes_of(view);
  if (!source.is_decoded) return boxes;
  const auto [known, is_new] =
      known_.try_emplace(source.tensor, static_cast<std::uint32_t>(decodings_.size()));
  if (is_new) decodings_.push_back(numbers_decoding(*catalog_, source.tensor, Dtype::f32));
  for (Box& box : boxes) box.decoding = known->second;
  return boxes;
}

}  // namespace loadstone
