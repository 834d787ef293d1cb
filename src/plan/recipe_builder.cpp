#include "loadstone/recipe_builder.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <unordered_set>
#include <utility>

#include "base/checked.h"
#include "base/only_errors.h"
#include "base/text.h"
#include "boxes/cast_kind.h"
#include "boxes/decodings.h"
#include "boxes/view.h"
#include "codec/tensor_table.h"
#include "loadstone/error.h"
#include "loadstone/name_hash.h"

namespace loadstone {

namespace {

// A value of the builder. Indices in the view's pieces refer to the catalog's tensors first, then
// to the decodings. If `rounded` is true, a cast to `dtype` loses precision, so the builder rejects
// a second cast.
struct Tensor {
  View view;
  Dtype dtype = Dtype::f32;
  bool rounded = false;
  bool is_source = false;  // an unchanged tensor of the catalog
  Constant constant;       // if set, the view has only a shape
  bool is_packed = false;  // a block format, which can only be decoded
};

[[noreturn]] void refuse_operation(std::string_view operation, Problem problem,
                                   std::string tensor = {}) {
  problem.message = fmt::format("{}: {}", operation, problem.message);
  throw_problem("plan.recipe", problem, {.tensor = std::move(tensor)});
}

void require(std::string_view operation, const std::optional<Problem>& problem) {
  if (problem) refuse_operation(operation, *problem);
}

// Selects every step-th index of one dimension. Existing view operations do this: the dimension is
// split in two, and the inner dimension has `step` elements.
std::optional<Problem> slice_steps(View& view, std::size_t dim, std::uint64_t start,
                                   std::uint64_t size, std::uint64_t step) {
  const auto at = static_cast<std::int64_t>(dim);
  const std::uint64_t extent = view.shape[dim];
  // Number of indices of the last step that are beyond the end.
  const std::uint64_t rest = start + size * step - extent;
  const bool reaches_out = start + size * step > extent;
  // The last step would exceed the end, so it is appended separately.
  if (reaches_out && rest > start) {
    View last = view;
    if (auto misfit = slice(last, at, start + (size - 1) * step, 1)) return misfit;
    if (auto misfit = slice_steps(view, dim, start, size - 1, step)) return misfit;
    std::vector<View> parts;
    parts.push_back(std::move(view));
    parts.push_back(std::move(last));
    return concat(std::move(parts), at, view);
  }
  const std::uint64_t phase = reaches_out ? rest : 0;
  if (auto misfit = slice(view, at, start - phase, size * step)) return misfit;
  auto split = view.shape.extents();
  split[dim] = size;
  split.insert(split.begin() + at + 1, step);
  if (auto misfit = reshape(view, Shape(split))) return misfit;
  if (auto misfit = slice(view, at + 1, phase, 1)) return misfit;
  split.erase(split.begin() + at + 1);
  return reshape(view, Shape(std::move(split)));
}

}  // namespace

struct RecipeBuilder::Impl {
  std::shared_ptr<const Catalog> catalog;
  std::vector<Tensor> values;
  Recipes recipes;
  std::uint64_t constant_bytes = 0;
  std::unordered_set<std::string, NameHash, std::equal_to<>> names;  // names of the targets

  [[nodiscard]] Encoding encoding_of(const ViewPiece& piece) const {
    const auto& tensors = catalog->tensors();
    if (piece.source < tensors.size()) return tensors[piece.source].encoding;
    return recipes.decodings[piece.source - tensors.size()].dtype;
  }

  // Returns boxes that have separate indices for sources and decodings.
  [[nodiscard]] std::vector<Box> boxes_for(const View& view) const {
    std::vector<Box> boxes = boxes_of(view);
    const auto count = static_cast<std::uint32_t>(catalog->tensors().size());
    for (Box& box : boxes) {
      if (box.source < count) continue;
      box.decoding = box.source - count;
      box.source = recipes.decodings[box.decoding].sources.front();
    }
    return boxes;
  }

  const Tensor& at(std::string_view operation, Value value) const {
    if (value < values.size()) return values[value];
    refuse_operation(operation, {"no value has this number", std::to_string(value),
                                 fmt::format("one of {}", values.size())});
  }

  // Returns the operand of any operation except add(). Constants are rejected, because they are not
  // views.
  const Tensor& view_at(std::string_view operation, Value value) const {
    const Tensor& tensor = at(operation, value);
    if (tensor.is_packed) {
      refuse_operation(operation,
                       {"a tensor of a block format can only be decoded",
                        fmt::format("blocks of shape {}", tensor.view.shape.text()), "decode()"});
    }
    if (tensor.constant == nullptr) return tensor;
    refuse_operation(operation, {"a constant can be a target only unchanged, without any operation",
                                 fmt::format("a constant of shape {}", tensor.view.shape.text())});
  }

  Value keep(Tensor tensor) {
    if (values.size() >= UINT32_MAX) refuse_operation("recipe", {"there are too many values"});
    values.push_back(std::move(tensor));
    return static_cast<Value>(values.size() - 1);
  }

  Value decoded(Decoding decoding) {
    const auto& tensors = catalog->tensors();
    PreparedDecoder form;
    if (auto problem = check_decoding(tensors, decoding, form)) {
      problem->message = fmt::format("{}: {}", printable(decoding.kernel), problem->message);
      refuse_operation("decode", *problem,
                       decoding.sources.empty() ? "" : tensors[decoding.sources.front()].name);
    }
    auto& decodings = recipes.decodings;
    if (decodings.size() >= UINT32_MAX - tensors.size())
      refuse_operation("decode", {"there are too many decodings"});
    const auto number = static_cast<std::uint32_t>(tensors.size() + decodings.size());
    const Dtype dtype = decoding.dtype;
    View view = whole_view(number, decoding.shape);
    decodings.push_back(std::move(decoding));
    return keep({std::move(view), dtype, false, false, {}});
  }

  // Returns a new value with the view modified by `change`.
  template <typename Change>
  Value changed(std::string_view operation, Value value, Change change) {
    return only_errors([&] {
      Tensor tensor = view_at(operation, value);
      tensor.is_source = false;
      require(operation, change(tensor.view));
      return keep(std::move(tensor));
    });
  }

  template <typename Join>
  Value joined(std::string_view operation, const std::vector<Value>& items, Join join) {
    return only_errors([&] {
      if (items.empty()) refuse_operation(operation, {"the list of values to join is empty"});
      Tensor result;
      result.dtype = view_at(operation, items.front()).dtype;
      std::vector<View> parts;
      parts.reserve(items.size());
      for (const Value item : items) {
        const Tensor& part = view_at(operation, item);
        if (part.dtype != result.dtype) {
          refuse_operation(operation,
                           {"the values to join have different dtypes",
                            fmt::format("{} and {}", name(result.dtype), name(part.dtype)),
                            std::string(name(result.dtype))});
        }
        result.rounded = result.rounded || part.rounded;
        parts.push_back(part.view);
      }
      require(operation, join(std::move(parts), result.view));
      return keep(std::move(result));
    });
  }
};

RecipeBuilder::RecipeBuilder(std::shared_ptr<const Catalog> catalog) try
    : impl_(std::make_unique<Impl>()) {
  if (catalog == nullptr) refuse_operation("recipe", {"the catalog is null"});
  impl_->catalog = std::move(catalog);
} catch (...) {
  throw_as_error();
}

RecipeBuilder::RecipeBuilder(RecipeBuilder&& other) noexcept = default;
RecipeBuilder& RecipeBuilder::operator=(RecipeBuilder&& other) noexcept = default;
RecipeBuilder::~RecipeBuilder() = default;

RecipeBuilder::Value RecipeBuilder::source(std::string_view name) {
  return only_errors([&] {
    const auto index = impl_->catalog->find(name);
    if (!index) {
      refuse_operation("source",
                       {"the checkpoint contains no tensor of this name", printable(name)},
                       std::string(name));
    }
    const TensorInfo& source = impl_->catalog->tensors()[*index];
    const bool is_plain = source.encoding.is_dtype();
    return impl_->keep({.view = source_view(*index, source),
                        .dtype = is_plain ? source.encoding.dtype() : Dtype::u8,
                        .is_source = true,
                        .constant = {},
                        .is_packed = !is_plain});
  });
}

RecipeBuilder::Value RecipeBuilder::constant(std::span<const std::byte> bytes, const Shape& shape,
                                             Dtype dtype) {
  return only_errors([&] {
    const auto elements = shape.numel();
    const auto expected = elements ? Encoding(dtype).byte_count(*elements) : std::nullopt;
    if (expected != bytes.size()) {
      refuse_operation("constant", {"the number of bytes does not fit the dtype and the shape",
                                    counted(bytes.size(), "byte"),
                                    fmt::format("{} {}", name(dtype), shape.text())});
    }
    if (bytes.size() > constant_bytes_max - impl_->constant_bytes) {
      refuse_operation("constant", {"the constants together are too large",
                                    human_bytes(impl_->constant_bytes + bytes.size()),
                                    human_bytes(constant_bytes_max)});
    }
    impl_->constant_bytes += bytes.size();
    return impl_->keep(
        {{shape, {}},
         dtype,
         false,
         false,
         std::make_shared<const std::vector<std::byte>>(bytes.begin(), bytes.end())});
  });
}

RecipeBuilder::Value RecipeBuilder::decode(std::string_view kernel,
                                           const std::vector<Value>& sources, const Shape& shape,
                                           Dtype dtype, float offset) {
  return only_errors([&] {
    Decoding decoding = {std::string(kernel), {}, shape, dtype, offset};
    for (const Value value : sources) {
      const Tensor& source = impl_->at("decode", value);
      if (!source.is_source) {
        refuse_operation(
            "decode", {"only unchanged tensors of the checkpoint can be decoded",
                       fmt::format("a value of shape {}", source.view.shape.text()), "a source"});
      }
      decoding.sources.push_back(source.view.pieces.front().source);
    }
    return impl_->decoded(std::move(decoding));
  });
}

RecipeBuilder::Value RecipeBuilder::numbers(const QuantizedTensor& quantized, Dtype dtype) {
  return only_errors([&] {
    Decoding decoding = quantized.decoding;
    decoding.dtype = dtype;
    const Value value = impl_->decoded(std::move(decoding));
    return quantized.is_transposed ? transpose(value, -1, -2) : value;
  });
}

RecipeBuilder::Value RecipeBuilder::cast(Value value, Dtype dtype, bool is_count) {
  return only_errors([&]() -> RecipeBuilder::Value {
    Tensor tensor = impl_->at("cast", value);
    if (tensor.dtype == dtype) return value;
    tensor = impl_->view_at("cast", value);
    if (tensor.rounded) {
      refuse_operation("cast", {"a value cannot be cast again after a cast that rounds",
                                fmt::format("{} to {}", name(tensor.dtype), name(dtype)),
                                "values that are unchanged, or cast without rounding"});
    }
    tensor.is_source = false;
    for (const ViewPiece& piece : tensor.view.pieces) {
      const Encoding source = impl_->encoding_of(piece);
      const CastKind way = cast_kind(source, dtype);
      if (way == CastKind::mismatch || way == CastKind::no_cast ||
          (way == CastKind::counted && !is_count)) {
        refuse_operation("cast", {"loadstone has no cast between these dtypes",
                                  fmt::format("{} to {}", source.name(), name(dtype))});
      }
      tensor.rounded = tensor.rounded || !is_exact(source.dtype(), dtype);
    }
    tensor.dtype = dtype;
    return impl_->keep(std::move(tensor));
  });
}

RecipeBuilder::Value RecipeBuilder::transpose(Value value, std::int64_t dim_a, std::int64_t dim_b) {
  return impl_->changed("transpose", value,
                        [&](View& view) { return loadstone::transpose(view, dim_a, dim_b); });
}

RecipeBuilder::Value RecipeBuilder::permute(Value value, const std::vector<std::int64_t>& order) {
  return impl_->changed("permute", value,
                        [&](View& view) { return loadstone::permute(view, order); });
}

RecipeBuilder::Value RecipeBuilder::slice(Value value, std::int64_t dim, std::uint64_t start,
                                          std::uint64_t size, std::uint64_t step) {
  return impl_->changed("slice", value, [&](View& view) -> std::optional<Problem> {
    const auto index = dim_index(dim, view.shape.rank());
    if (step == 1 || size < 2 || !index) return loadstone::slice(view, dim, start, size);
    const auto last = checked_mul_add(size - 1, step, start);
    if (step == 0 || !last || *last >= view.shape[*index]) {
      return Problem{fmt::format("{} indices from {}, with step {}, exceed dimension {}", size,
                                 start, step, dim),
                     view.shape.text()};
    }
    if (view.shape.numel() == 0u) return loadstone::slice(view, dim, start, size);
    return slice_steps(view, *index, start, size, step);
  });
}

RecipeBuilder::Value RecipeBuilder::reshape(Value value, const Shape& shape) {
  return impl_->changed("reshape", value,
                        [&](View& view) { return loadstone::reshape(view, shape); });
}

RecipeBuilder::Value RecipeBuilder::concat(const std::vector<Value>& values, std::int64_t dim) {
  return impl_->joined("concat", values, [&](std::vector<View> parts, View& result) {
    return loadstone::concat(std::move(parts), dim, result);
  });
}

RecipeBuilder::Value RecipeBuilder::stack(const std::vector<Value>& values, std::int64_t dim) {
  return impl_->joined("stack", values, [&](std::vector<View> parts, View& result) {
    return loadstone::stack(std::move(parts), dim, result);
  });
}

const Shape& RecipeBuilder::shape(Value value) const {
  return only_errors([&]() -> const Shape& { return impl_->at("shape", value).view.shape; });
}

Dtype RecipeBuilder::dtype(Value value) const {
  return only_errors([&] { return impl_->at("dtype", value).dtype; });
}

void RecipeBuilder::add(std::string target, Value value) {
  only_errors([&] {
    const Tensor& tensor = impl_->at("add", value);
    if (tensor.is_packed) (void)impl_->view_at("add", value);  // throws
    if (!impl_->names.insert(target).second) {
      refuse_operation("add", {"the target already has a recipe", printable(target)}, target);
    }
    impl_->recipes.targets.push_back({std::move(target), tensor.view.shape, tensor.dtype,
                                      impl_->boxes_for(tensor.view), tensor.constant});
  });
}

Recipes RecipeBuilder::finish() {
  return only_errors([&]() -> Recipes {
    impl_->names.clear();
    // The decodings are kept, because existing values still refer to them.
    return {std::exchange(impl_->recipes.targets, {}), impl_->recipes.decodings};
  });
}

}  // namespace loadstone
