#include <fmt/format.h>

#include "base/ceil_div.h"
#include "base/text.h"
#include "codec/scaled/scaled.h"
#include "codec/words/words.h"

namespace loadstone::words {

namespace {

// Returns the tensor if it is a matrix. Otherwise adds it to `lacks`, as if it were missing.
std::uint32_t matrix(const TensorTable& table, const std::string& name,
                     std::vector<std::string>& lacks) {
  const auto found = table.find(name);
  if (found != TensorTable::none && table[found].shape.rank() == 2) return found;
  lacks.push_back(name);
  return TensorTable::none;
}

}  // namespace

QuantizedTensor Module::quantized() const {
  QuantizedTensor made = quantized_tensor(name + ".weight", codes, {scales, zeros});
  made.has_zero_points = zeros != TensorTable::none;
  if (order != TensorTable::none) made.states.push_back(order);
  return made;
}

std::optional<Module> module_of(const TensorTable& table, std::uint32_t tensor) {
  const TensorInfo& codes = table[tensor];
  constexpr std::string_view suffix = ".qweight";
  if (!is_dtype(codes, {Dtype::i32}) || !codes.name.ends_with(suffix)) return std::nullopt;
  if (codes.shape.rank() != 2) return std::nullopt;
  Module module = {.name = without_suffix(codes.name, suffix), .codes = tensor};
  module.scales = matrix(table, module.name + ".scales", module.lacks);
  module.zeros = matrix(table, module.name + ".qzeros", module.lacks);
  module.order = table.find(module.name + ".g_idx");
  return module;
}

std::optional<Problem> check_module(const DecodeRequest& request, Packing& form) {
  const auto& parts = request.parts;
  const auto refuse = [](const char* message, std::string found, std::string expected) {
    return Problem{message, std::move(found), std::move(expected)};
  };
  if (parts.size() != 3 && parts.size() != 4) {
    return refuse(
        "the decoder needs words, scales and zero points, and optionally an order of groups",
        counted(parts.size(), "tensor"), "3 or 4 tensors");
  }
  for (const std::size_t part : {std::size_t{0}, std::size_t{2}}) {
    if (!scaled::is_one_of(parts[part].encoding, {Dtype::i32})) {
      return refuse("the words have the wrong dtype", std::string(parts[part].encoding.name()),
                    "I32");
    }
  }
  if (!scaled::is_one_of(parts[1].encoding, {Dtype::f32, Dtype::f16, Dtype::bf16})) {
    return refuse("the decoder does not support the dtype of the scales",
                  std::string(parts[1].encoding.name()), "F32, F16 or BF16");
  }
  const Shape& scales = parts[1].shape;
  if (request.shape.rank() != 2 || parts[0].shape.rank() != 2 || scales.rank() != 2 ||
      parts[2].shape.rank() != 2) {
    return refuse("the weight is not a matrix or a stack of matrices", request.shape.text(), {});
  }
  form.dtype = request.dtype;
  form.scale = parts[1].encoding.dtype();
  form.rows = request.shape[0];
  form.columns = request.shape[1];
  form.groups = scales[0];
  form.has_zeros = true;
  form.group_size = request.group_size;
  const bool fits = form.group_size > 0 && scales[1] == form.columns &&
                    ceil_div(form.rows, form.group_size) == form.groups;
  if (!fits) {
    return refuse("the numbers of groups and scales differ", scales.text(),
                  fmt::format("groups of size {} in {}", form.group_size, request.shape.text()));
  }
  form.has_order = parts.size() == 4;
  if (!form.has_order) return std::nullopt;
  if (scaled::is_one_of(parts[3].encoding, {Dtype::i32}) && parts[3].shape == Shape({form.rows})) {
    return std::nullopt;
  }
  return refuse("the order of groups does not fit the number of rows", parts[3].shape.text(),
                Shape({form.rows}).text());
}

}  // namespace loadstone::words
