#include "verify/element_reader.h"

#include <algorithm>
#include <utility>

#include "boxes/view.h"

namespace loadstone {

namespace {

constexpr std::uint64_t staging_bytes_max = std::uint64_t{16} << 20;

}  // namespace

std::size_t bytes_at_once(const TensorRecipe& value) {
  const bool is_in_order = std::ranges::all_of(value.boxes, [](const Box& box) {
    return box.dims.empty() || box.dims.back().source_stride == 1;
  });
  return is_in_order ? chunk_bytes_max : strided_chunk_bytes_max;
}

Box whole_box(std::uint32_t source, const TensorInfo& tensor) {
  return boxes_of(source_view(source, tensor)).front();
}

ElementReader::ElementReader(const OpenShards& shards, const TensorInfo& tensor, bool as_in_file,
                             std::atomic<bool>& stop)
    : shards_(shards), stop_(stop), tensor_(&tensor), size_(tensor.byte_count()) {
  if (as_in_file || tensor.strides.empty()) return;
  const std::uint64_t elements = tensor.shape.numel().value_or(0);
  size_ = tensor.encoding.byte_count(elements).value_or(0);
  if (size_ == 0) return;
  element_bytes_ = size_ / elements;
  const auto index = static_cast<std::uint32_t>(&tensor - shards.catalog().tensors().data());
  value_ = {tensor.shape, tensor.encoding.dtype(), {whole_box(index, tensor)}, {}};
  open(tensor.name, tensor.encoding.dtype());
}

ElementReader::ElementReader(const OpenShards& shards, const std::string& name, TensorRecipe value,
                             Dtype dtype, std::atomic<bool>& stop)
    : shards_(shards),
      stop_(stop),
      size_(value.shape.numel().value_or(0) * element_bytes(dtype)),
      element_bytes_(element_bytes(dtype)),
      value_(std::move(value)) {
  open(name, dtype);
}

void ElementReader::open(const std::string& name, Dtype dtype) {
  reader_ =
      std::make_unique<ValueReader>(shards_.catalog(), shards_.sources(), staging_bytes_max, stop_);
  reader_->open(value_.as_value(name, dtype), value_.decodings);
}

void ElementReader::read(std::uint64_t begin, std::span<std::byte> into) {
  if (element_bytes_ == 0) {
    shards_.read(*tensor_, begin, into);
  } else {
    reader_->read(begin / element_bytes_, (begin + into.size()) / element_bytes_, into);
  }
}

}  // namespace loadstone
