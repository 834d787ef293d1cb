#include "loadstone/tensor_reader.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "base/text.h"
#include "boxes/view.h"
#include "execute/shard_files.h"
#include "execute/value_reader.h"
#include "loadstone/error.h"
#include "loadstone/quantized_tensors.h"
#include "plan/decodings.h"
#include "plan/dtypes.h"

namespace loadstone {

namespace {

// The tensor of the file that has the name, or holds the codes of the quantized one that has it.
std::uint32_t index_of(const Catalog& catalog, std::string_view name) {
  const auto& quantized = catalog.quantized().tensors();
  const auto found = std::ranges::find(quantized, name, &QuantizedTensor::name);
  if (found != quantized.end()) {
    if (!found->is_readable()) {
      const Finding& defect = found->defect;
      throw Error(defect.code, defect.message,
                  {.tensor = found->name, .found = defect.found, .expected = defect.expected});
    }
    return found->data;
  }
  if (const auto index = catalog.find(name)) return *index;
  throw Error("plan.missing", "the checkpoint has no such tensor", {.tensor = printable(name)});
}

}  // namespace

struct TensorReader::Impl {
  Impl(std::shared_ptr<const Catalog> of, std::uint32_t tensor, std::string_view name,
       std::optional<Dtype> wanted, Storage* storage)
      : catalog(std::move(of)),
        target(target_of(*catalog, tensor, name, wanted, decodings)),
        elements(target.shape.numel().value_or(0)),
        shards(*catalog, storage, needed()),
        reader(catalog, shards.sources(), staging_bytes_max, stop) {
    reader.open({.name = target.name,
                 .boxes = target.recipe.boxes,
                 .decodings = decodings,
                 .shape = target.shape,
                 .dtype = target.dtype});
  }

  static PlannedTarget target_of(const Catalog& catalog, std::uint32_t tensor,
                                 std::string_view name, std::optional<Dtype> wanted,
                                 std::vector<Decoding>& decodings) {
    const TensorInfo& source = catalog.tensors()[tensor];
    const bool is_decoded =
        catalog.quantized().find(tensor) != nullptr || !source.encoding.is_dtype();
    PlannedTarget target;
    target.name = name;
    target.dtype = wanted.value_or(is_decoded ? Dtype::f32 : source.encoding.dtype());
    View view = is_decoded ? numbers_view(catalog, tensor, tensor) : source_view(tensor, source);
    target.shape = view.shape;
    target.recipe.boxes = boxes_of(view);
    Encoding encoding = source.encoding;
    if (is_decoded) {
      decodings = {numbers_decoding(catalog, tensor, decoded_dtype(target.dtype))};
      for (Box& box : target.recipe.boxes) box.decoding = 0;
      encoding = decodings.front().dtype;
    }
    const Passage way = passage(encoding, target.dtype);
    if (way == Passage::same || way == Passage::cast) return target;
    throw Error("plan.dtype", "there is no cast between these",
                {.tensor = target.name,
                 .found = std::string(encoding.name()),
                 .expected = std::string(loadstone::name(target.dtype))});
  }

  [[nodiscard]] std::vector<bool> needed() const {
    std::vector<bool> shards_needed(catalog->shards().size(), false);
    for (const std::uint32_t source : sources_of(target.recipe.boxes, decodings)) {
      shards_needed[catalog->tensors()[source].shard] = true;
    }
    return shards_needed;
  }

  std::shared_ptr<const Catalog> catalog;
  std::vector<Decoding> decodings;
  PlannedTarget target;
  std::uint64_t elements;
  OpenShards shards;
  std::atomic<bool> stop = false;
  ValueReader reader;
};

TensorReader::TensorReader(std::shared_ptr<const Catalog> catalog, std::string_view name,
                           std::optional<Dtype> dtype, Storage* storage) {
  if (catalog == nullptr) throw Error("plan.options", "there is no catalog", {.field = "catalog"});
  const std::uint32_t tensor = index_of(*catalog, name);
  impl_ = std::make_unique<Impl>(std::move(catalog), tensor, name, dtype, storage);
}

TensorReader::TensorReader(TensorReader&&) noexcept = default;
TensorReader& TensorReader::operator=(TensorReader&&) noexcept = default;
TensorReader::~TensorReader() = default;

const Shape& TensorReader::shape() const noexcept { return impl_->target.shape; }
Dtype TensorReader::dtype() const noexcept { return impl_->target.dtype; }
std::uint64_t TensorReader::elements() const noexcept { return impl_->elements; }

void TensorReader::read(std::uint64_t begin, std::uint64_t end, std::span<std::byte> to) {
  impl_->reader.read(begin, end, to);
}

std::vector<std::byte> TensorReader::read() {
  std::vector<std::byte> bytes(impl_->target.byte_count());
  read(0, elements(), bytes);
  return bytes;
}

std::vector<float> read_numbers(std::shared_ptr<const Catalog> catalog, std::string_view name) {
  TensorReader reader(std::move(catalog), name, Dtype::f32);
  std::vector<float> numbers(reader.elements());
  reader.read(0, numbers.size(), std::as_writable_bytes(std::span(numbers)));
  return numbers;
}

}  // namespace loadstone
