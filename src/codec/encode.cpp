#include "codec/encode.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/only_errors.h"
#include "base/unknown_word.h"
#include "codec/families.h"
#include "loadstone/error.h"

namespace loadstone {

std::span<const ComponentName> WrittenEncoding::names(NamingStyle style) const noexcept {
  switch (style) {
    case NamingStyle::unified:
      return unified_names;
    case NamingStyle::compressed:
      return compressed_names;
    case NamingStyle::gguf:
      return gguf_names;
    case NamingStyle::bnb:
      break;
  }
  return bnb_names;
}

const WrittenEncoding* find_written_encoding(std::string_view name) noexcept {
  for (const Family* const family : families()) {
    const auto found = std::ranges::find(family->written, name, &WrittenEncoding::name);
    if (found != family->written.end()) return &*found;
  }
  return nullptr;
}

std::string name_in_gguf(std::string_view name) {
  const std::string blocks = fmt::format("{}-gguf", name);
  return find_written_encoding(blocks) == nullptr ? std::string(name) : blocks;
}

const WrittenEncoding& written_encoding(const Quantization& quantization) {
  const WrittenEncoding* const found = find_written_encoding(quantization.encoding);
  if (found == nullptr)
    throw Error("internal", "no encoding has this name", {.found = quantization.encoding});
  return *found;
}

std::vector<const WrittenEncoding*> written_encodings() {
  std::vector<const WrittenEncoding*> all;
  for (const Family* const family : families()) {
    for (const WrittenEncoding& each : family->written) all.push_back(&each);
  }
  return all;
}

std::vector<std::string> written_encoding_names() {
  std::vector<std::string> names;
  for (const WrittenEncoding* const each : written_encodings()) names.emplace_back(each->name);
  return names;
}

const ComponentName* find_component(const WrittenEncoding& encoding, NamingStyle style,
                                    std::string_view component) {
  const auto names = encoding.names(style);
  const auto found = std::ranges::find(names, component, &ComponentName::component);
  return found == names.end() ? nullptr : &*found;
}

Shape shape_in_file(ComponentShape in_file, const Shape& shape) {
  std::vector<std::uint64_t> extents = shape.extents();
  switch (in_file) {
    case ComponentShape::same:
      break;
    case ComponentShape::flat:
      if (extents.size() > 1 && extents.back() == 1) extents.pop_back();
      break;
    case ComponentShape::column:
      if (extents.size() == 1) extents.push_back(1);
      break;
    case ComponentShape::one:
      if (extents.empty()) extents.push_back(1);
      break;
    case ComponentShape::blocks_4d:
      if (extents.size() == 2) extents = {extents[0], 1, extents[1], 1};
      break;
  }
  return Shape(std::move(extents));
}

std::optional<Problem> prepare_quantization(const Quantization& quantization, const Shape& shape,
                                            Dtype dtype, QuantizedLayout& form) {
  form = {};
  if (dtype != Dtype::f32 && dtype != Dtype::f16 && dtype != Dtype::bf16) {
    return Problem{"only F32, F16 and BF16 tensors can be quantized", std::string(name(dtype))};
  }
  const auto elements = shape.numel();
  if (!elements || !Encoding(dtype).byte_count(*elements)) {
    return Problem{"the size does not fit in 64 bits", shape.text()};
  }
  if (quantization.nested_offset && !quantization.nested) {
    return Problem{"an offset was passed, but the scales are not nested"};
  }
  const WrittenEncoding* const encoding = find_written_encoding(quantization.encoding);
  if (encoding == nullptr) {
    return Problem{unknown_word("encoding", quantization.encoding, written_encoding_names())};
  }
  const auto& dialects = encoding->dialects;
  if (!quantization.dialect.empty() && std::ranges::count(dialects, quantization.dialect) == 0) {
    return Problem{"no dialect has this name", quantization.dialect,
                   fmt::format("{}", fmt::join(dialects, " or "))};
  }
  if (quantization.importance != nullptr && !encoding->is_gguf()) {
    return Problem{"this encoding does not use an importance matrix", quantization.encoding,
                   "an encoding of GGUF"};
  }
  form.kind = encoding->kind;
  form.dtype = dtype;
  form.elements = *elements;
  if (auto problem = encoding->prepare(quantization, shape, form)) return problem;
  form.exact_first =
      quantization.exact_first.value_or(false) && dtype == Dtype::f32 && can_be_exact_first(form);
  for (const QuantizedPart& part : form.parts) {
    const auto count = part.shape.numel();
    if (!count || !Encoding(part.dtype).byte_count(*count)) {
      return Problem{"the size does not fit in 64 bits", shape.text()};
    }
  }
  return std::nullopt;
}

std::optional<BlockGrid> exact_grid(const Quantization& quantization, const Shape& shape,
                                    Dtype dtype) {
  QuantizedLayout form;
  if (prepare_quantization(quantization, shape, dtype, form) || !form.exact_first) {
    return std::nullopt;
  }
  const WrittenEncoding& encoding = written_encoding(quantization);
  std::vector<DecodePart> parts;
  for (const QuantizedPart& part : form.parts) parts.push_back({part.dtype, part.shape});
  if (encoding.is_gguf()) parts[0] = {form.block, shape};
  PreparedDecoder decoder;
  if (prepare_decoding(encoding.kernel, parts, shape, Dtype::f32, 0, decoder, form.group_size)) {
    return std::nullopt;
  }
  return decoder.decoder->grid();
}

std::vector<QuantizedEncoding> quantized_encodings() {
  return only_errors([&] {
    std::vector<QuantizedEncoding> all;
    for (const Family* const family : families()) {
      for (const std::string_view name : family->encodings) {
        const WrittenEncoding* const written = find_written_encoding(name);
        all.push_back({name, written != nullptr ? written->dialects : decltype(all[0].dialects)()});
      }
    }
    return all;
  });
}

std::vector<QuantizedPart> quantized_parts(const Quantization& quantization, const Shape& shape,
                                           Dtype dtype) {
  return only_errors([&] {
    QuantizedLayout form;
    if (auto problem = prepare_quantization(quantization, shape, dtype, form)) {
      throw_problem("plan.quantize", *problem, {.field = "quantize"});
    }
    return std::move(form.parts);
  });
}

}  // namespace loadstone
