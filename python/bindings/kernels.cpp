#include <algorithm>
#include <cctype>
#include <cstring>

#include "bindings.h"
#include "buffers.h"
#include "codec/decode.h"
#include "formats/gguf.h"
#include "kernels/cast.h"
#include "kernels/gguf.h"

namespace loadstone::python {

namespace {

// Used only by tests, which compare the cast between every pair of dtypes with torch.
nb::bytes cast_bytes(const nb::bytes& source, std::string_view source_name,
                     std::string_view target_name) {
  const Dtype from = dtype_argument(source_name);
  const Dtype to = dtype_argument(target_name);
  if (!can_cast(from, to)) {
    throw Error("plan.dtype", "loadstone has no cast between these dtypes",
                {.found = std::string(name(from)), .expected = std::string(name(to))});
  }
  const std::size_t count = source.size() / element_bytes(from);
  std::vector<std::byte> target(count * element_bytes(to));
  cast_between(from, to).run(static_cast<const std::byte*>(source.data()), target.data(), count);
  return nb::bytes(target.data(), target.size());
}

// Bytes, dtype and shape of a component.
using PartRow = std::tuple<nb::bytes, std::string_view, Extents>;

// Used only by tests, which compare the result with transformers' result for the same bytes.
nb::bytes decode_bytes(std::string_view kernel, const std::vector<PartRow>& rows,
                       const Extents& extents, std::string_view dtype_name, float offset) {
  std::vector<DecodePart> parts;
  std::vector<const std::byte*> bytes_of_parts;
  for (const auto& [bytes, dtype, shape] : rows) {
    parts.push_back({dtype_argument(dtype), Shape(shape)});
    const auto expected = parts.back().encoding.byte_count(parts.back().shape.numel().value_or(0));
    if (expected != bytes.size())
      throw Error("usage", "the number of bytes does not fit the dtype and shape");
    bytes_of_parts.push_back(static_cast<const std::byte*>(bytes.data()));
  }
  const Dtype dtype = dtype_argument(dtype_name);
  PreparedDecoder form;
  if (auto problem = prepare_decoding(kernel, parts, Shape(extents), dtype, offset, form)) {
    throw_problem("plan.recipe", *problem);
  }
  std::vector<std::byte> target(form.elements * element_bytes(dtype));
  decode(form, 0, form.elements, bytes_of_parts, target.data());
  return nb::bytes(target.data(), target.size());
}

// Returns the block format with a name such as "Q4_K". Case does not matter.
BlockFormat block_format_argument(std::string_view text) {
  std::string wanted(text);
  std::ranges::transform(wanted, wanted.begin(),
                         [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  std::string known;
  for (std::uint32_t id = 0; const auto type = gguf_type(id); ++id) {
    const bool is_wanted = type->name == wanted;
    if (!type->encoding) {
      if (is_wanted) {
        throw Error("gg.type", "this type was removed from the format", {.found = wanted});
      }
    } else if (!type->encoding->is_dtype()) {
      const BlockFormat format = type->encoding->block_format();
      const bool has_values = gguf_decoder(format, Dtype::f32, GgufMode::exact) != nullptr;
      if (is_wanted && has_values) return format;
      if (is_wanted) {
        throw Error("gg.no_dequant", "this type is for activations and cannot be dequantized",
                    {.found = wanted});
      }
      if (has_values) known += (known.empty() ? "" : " ") + std::string(type->name);
    }
  }
  throw Error("plan.encoding", "this version of loadstone cannot decode this encoding",
              {.found = std::string(text), .expected = known});
}

GgufMode mode_argument(std::string_view text) {
  if (text == "exact") return GgufMode::exact;
  if (text == "diffusers-compatible") return GgufMode::half;
  throw Error("usage", "the dialect is unknown",
              {.field = "dialect",
               .found = std::string(text),
               .expected = "exact or diffusers-compatible"});
}

// Decodes whole blocks. Reads and writes the caller's buffers.
void decode_gguf(std::string_view format_name, const SourceBytes& blocks, const TargetBytes& target,
                 std::string_view dtype_name, std::string_view mode_name) {
  const BlockFormat format = block_format_argument(format_name);
  const Dtype dtype = dtype_argument(dtype_name);
  const DecodeBlocks decoder = gguf_decoder(format, dtype, mode_argument(mode_name));
  if (decoder == nullptr) {
    throw Error("plan.encoding", "this dialect does not decode this block format to this dtype",
                {.found = std::string(Encoding(format).name()) + " to " + std::string(dtype_name) +
                          ", " + std::string(mode_name),
                 .expected = "to F32, BF16 or F16; diffusers-compatible: Q4_0 to Q8_0, Q2_K to "
                             "Q6_K, IQ4_NL, IQ4_XS"});
  }
  const BlockLayout block = layout(format);
  const std::uint64_t count = blocks.size() / block.bytes;
  const std::size_t element = element_bytes(dtype);
  if (blocks.size() % block.bytes != 0 || target.size() % (block.elements * element) != 0 ||
      target.size() / (block.elements * element) != count) {
    throw Error("usage", "the number of bytes does not fit the number of whole blocks",
                {.found = std::to_string(blocks.size()) + " for " + std::to_string(target.size())});
  }
  const nb::gil_scoped_release release;
  decoder(bytes_of(blocks), count, bytes_of(target));
}

std::pair<std::uint32_t, std::uint32_t> gguf_layout(std::string_view format_name) {
  const BlockLayout block = layout(block_format_argument(format_name));
  return {block.elements, block.bytes};
}

}  // namespace

void bind_kernels(nb::module_& module) {
  module.def("cast", &cast_bytes, nb::arg("source"), nb::arg("source_dtype"),
             nb::arg("target_dtype"));
  module.def("decode", &decode_bytes, nb::arg("kernel"), nb::arg("sources"), nb::arg("shape"),
             nb::arg("dtype"), nb::arg("offset") = 0.0f);
  module.def("decode_gguf", &decode_gguf, nb::arg("format"), nb::arg("blocks"), nb::arg("target"),
             nb::arg("dtype"), nb::arg("mode") = "exact");
  nb::dict dialects;
  for (const QuantizedEncoding& each : quantized_encodings()) {
    dialects[nb::cast(each.name)] =
        nb::tuple(nb::cast(std::vector(each.dialects.begin(), each.dialects.end())));
  }
  module.attr("DIALECTS") = dialects;
  module.def("gguf_layout", &gguf_layout, nb::arg("format"));
  // Returns the safetensors name of a dtype as users write it ("torch.bfloat16", "bf16"), or None.
  module.def("parse_dtype", [](std::string_view text) -> std::optional<std::string_view> {
    const auto dtype = parse_dtype(text);
    return dtype ? std::optional(name(*dtype)) : std::nullopt;
  });
  module.def("dtypes", [] {
    std::vector<std::pair<std::string_view, std::string_view>> names;
    for (const DtypeInfo& known : dtype_table) names.emplace_back(known.name, known.torch_name);
    return names;
  });
  module.def("can_cast", [](std::string_view source, std::string_view target) {
    return can_cast(dtype_argument(source), dtype_argument(target));
  });
}

}  // namespace loadstone::python
