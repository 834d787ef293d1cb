#include "loadstone/tensor_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "base/only_errors.h"
#include "base/refuse_option.h"
#include "base/text.h"
#include "base/unknown_word.h"
#include "boxes/cast_kind.h"
#include "boxes/decodings.h"
#include "catalog/open_shards.h"
#include "engine/value_reader.h"
#include "kernels/cast.h"
#include "loadstone/error.h"
#include "loadstone/quantized_tensors.h"

namespace loadstone {

namespace {

// Returns the index of the tensor with this name, or of the codes of the quantized tensor with this
// name.
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
  std::vector<std::string> known;
  for (const TensorInfo& tensor : catalog.tensors()) known.push_back(tensor.name);
  for (const QuantizedTensor& tensor : quantized) known.push_back(tensor.name);
  throw Error("plan.missing",
              "the checkpoint has no tensor of this name" + did_you_mean(name, known),
              {.path = catalog.shown_path(), .tensor = printable(name)});
}

}  // namespace

struct TensorReader::Impl {
  Impl(std::shared_ptr<const Catalog> of, std::uint32_t tensor, std::string_view named,
       std::optional<Dtype> wanted, Storage* storage)
      : catalog(std::move(of)),
        name(named),
        recipe(tensor_recipe(*catalog, tensor, wanted)),
        dtype(wanted.value_or(recipe.dtype)),
        elements(recipe.shape.numel().value_or(0)),
        shards(*catalog, storage, sources_of(recipe.boxes, recipe.decodings)),
        reader(*catalog, shards.sources(), staging_bytes_max, stop) {
    const CastKind way = cast_kind(recipe.dtype, dtype);
    if (way != CastKind::same && way != CastKind::cast) {
      throw Error("plan.dtype", "loadstone has no cast between these dtypes",
                  {.tensor = name,
                   .found = std::string(loadstone::name(recipe.dtype)),
                   .expected = std::string(loadstone::name(dtype))});
    }
    reader.open(recipe.as_value(name, dtype), recipe.decodings);
  }

  std::shared_ptr<const Catalog> catalog;
  std::string name;
  TensorRecipe recipe;
  Dtype dtype;
  std::uint64_t elements;
  OpenShards shards;
  std::atomic<bool> stop = false;
  ValueReader reader;
};

TensorReader::TensorReader(std::shared_ptr<const Catalog> catalog, std::string_view name,
                           std::optional<Dtype> dtype, Storage* storage) try {
  if (catalog == nullptr) refuse_option("catalog", "the catalog is null");
  const std::uint32_t tensor = index_of(*catalog, name);
  impl_ = std::make_unique<Impl>(std::move(catalog), tensor, name, dtype, storage);
} catch (...) {
  throw_as_error();
}

TensorReader::TensorReader(TensorReader&&) noexcept = default;
TensorReader& TensorReader::operator=(TensorReader&&) noexcept = default;
TensorReader::~TensorReader() = default;

const Shape& TensorReader::shape() const noexcept { return impl_->recipe.shape; }
Dtype TensorReader::dtype() const noexcept { return impl_->dtype; }
std::uint64_t TensorReader::elements() const noexcept { return impl_->elements; }

void TensorReader::read(std::uint64_t begin, std::uint64_t end, std::span<std::byte> to) {
  only_errors([&] { impl_->reader.read(begin, end, to); });
}

std::vector<std::byte> TensorReader::read() {
  return only_errors([&] {
    std::vector<std::byte> bytes(Encoding(dtype()).byte_count(elements()).value_or(0));
    read(0, elements(), bytes);
    return bytes;
  });
}

// Returns true for a tensor of integers or booleans that are not codes.
static bool is_integer(const Catalog& catalog, std::string_view name) {
  const auto index = catalog.find(name);
  if (!index || catalog.quantized().find(*index) != nullptr) return false;
  const Encoding encoding = catalog.tensors()[*index].encoding;
  if (!encoding.is_dtype()) return false;
  const DtypeKind found = kind(encoding.dtype());
  return found == DtypeKind::integer || found == DtypeKind::boolean;
}

// Returns the integers or booleans of a tensor as floats.
static std::vector<float> read_integers(TensorReader reader, std::string_view name) {
  constexpr std::int64_t largest = 1 << 24;  // floats represent all integers up to this one
  const std::vector<std::byte> bytes = reader.read();
  std::vector<std::int64_t> wide(reader.elements());
  cast_between(reader.dtype(), Dtype::i64)
      .run(bytes.data(), reinterpret_cast<std::byte*>(wide.data()), wide.size());
  const std::int64_t least = dtype_info(reader.dtype()).is_signed ? -largest : 0;
  const auto fits = [&](std::int64_t value) { return value >= least && value <= largest; };
  if (!std::ranges::all_of(wide, fits)) {
    throw Error("plan.dtype",
                "read_numbers() returns floats, which do not represent all values of this tensor: "
                "TensorReader reads integers in their own dtype",
                {.tensor = std::string(name),
                 .found = std::string(loadstone::name(reader.dtype())),
                 .expected = fmt::format("integers up to {}", largest)});
  }
  return {wide.begin(), wide.end()};
}

std::vector<float> read_numbers(std::shared_ptr<const Catalog> catalog, std::string_view name) {
  return only_errors([&] {
    if (catalog != nullptr && is_integer(*catalog, name)) {
      return read_integers(TensorReader(std::move(catalog), name), name);
    }
    TensorReader reader(std::move(catalog), name, Dtype::f32);
    std::vector<float> numbers(reader.elements());
    reader.read(0, numbers.size(), std::as_writable_bytes(std::span(numbers)));
    return numbers;
  });
}

}  // namespace loadstone
