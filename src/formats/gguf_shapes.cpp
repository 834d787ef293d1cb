#include "formats/gguf_shapes.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "base/text.h"
#include "formats/file_header.h"
#include "formats/metadata.h"

namespace loadstone {

namespace {

constexpr std::uint64_t folded_row = 256;
constexpr std::size_t shape_rank_max = 32;

std::optional<std::uint64_t> extent_of(const MetadataValue& item) {
  if (const auto* const number = std::get_if<std::uint64_t>(&item.value)) return *number;
  const auto* const number = std::get_if<std::int64_t>(&item.value);
  if (number == nullptr || *number < 0) return std::nullopt;
  return static_cast<std::uint64_t>(*number);
}

std::optional<Shape> shape_of(const MetadataValue& value) {
  const auto* const array = std::get_if<MetadataArray>(&value.value);
  if (array == nullptr || array->size() > shape_rank_max) return std::nullopt;
  std::vector<std::uint64_t> extents;
  for (const MetadataValue item : *array) {
    const auto extent = extent_of(item);
    if (!extent) return std::nullopt;
    extents.push_back(*extent);
  }
  return Shape(std::move(extents));
}

}  // namespace

void restore_gguf_shapes(const Metadata& metadata, const std::vector<Shard>& shards,
                         std::vector<TensorInfo>& tensors) {
  const auto first = metadata.lower_bound(std::string(gguf_shape_prefix));
  if (first == metadata.end() || !first->first.starts_with(gguf_shape_prefix)) return;
  for (TensorInfo& tensor : tensors) {
    const Shard& shard = shards.at(tensor.shard);
    if (shard.format != FileFormat::gguf) continue;
    const auto item = metadata.find(std::string(gguf_shape_prefix) + tensor.name);
    if (item == metadata.end()) continue;
    auto shape = shape_of(item->second);
    if (!shape) {
      refuse(shard.path,
             {"gg.kv_type", "a shape must be an array of integers", item->first,
              type_name(item->second), "array of i32"},
             tensor.name);
    }
    if (shape->numel() != tensor.shape.numel()) {
      refuse(shard.path,
             {"gg.dims", "the original shape has a different number of elements", item->first,
              shape->text(), "as many as " + tensor.shape.text()},
             tensor.name);
    }
    tensor.shape = *std::move(shape);
  }
}

Shape folded_shape(Encoding encoding, const Shape& shape) {
  const std::uint64_t elements = shape.numel().value_or(0);
  const std::uint64_t block = layout(encoding.block_format()).elements;
  const std::uint64_t row = elements % folded_row == 0 ? folded_row : block;
  return Shape({elements / row, row});
}

MetadataValue gguf_shape_value(const Shape& shape) {
  std::vector<std::byte> bytes;
  for (const std::uint64_t extent : shape.extents()) {
    for (unsigned i = 0; i < 4; ++i) bytes.push_back(static_cast<std::byte>(extent >> (8 * i)));
  }
  MetadataArray array(MetadataType::i32);
  array.assign_numbers(std::move(bytes));
  return {.value = std::move(array), .type = MetadataType::array};
}

}  // namespace loadstone
