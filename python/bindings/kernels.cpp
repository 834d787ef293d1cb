#include <cstring>

#include "bindings.h"
#include "kernels/cast.h"
#include "kernels/decode.h"

namespace loadstone::python {

namespace {

// For the tests, which compare every pair of dtypes with torch.
nb::bytes cast_bytes(const nb::bytes& source, std::string_view source_name,
                     std::string_view target_name) {
  const Dtype from = dtype_argument(source_name);
  const Dtype to = dtype_argument(target_name);
  if (!can_cast(from, to)) {
    throw Error("plan.dtype", "no cast between these",
                {.found = std::string(name(from)), .expected = std::string(name(to))});
  }
  const std::size_t count = source.size() / element_bytes(from);
  std::vector<std::byte> target(count * element_bytes(to));
  cast_between(from, to).run(static_cast<const std::byte*>(source.data()), target.data(), count);
  return nb::bytes(target.data(), target.size());
}

// bytes, dtype, shape
using PartRow = std::tuple<nb::bytes, std::string_view, std::vector<std::uint64_t>>;

// For the tests, which compare with what transformers makes of the same bytes.
nb::bytes decode_bytes(std::string_view kernel, const std::vector<PartRow>& rows,
                       const std::vector<std::uint64_t>& extents, std::string_view dtype_name) {
  std::vector<DecodePart> parts;
  for (const auto& [bytes, dtype, shape] : rows) {
    parts.push_back({dtype_argument(dtype), Shape(shape)});
    const auto expected = parts.back().encoding.byte_count(parts.back().shape.numel().value_or(0));
    if (expected != bytes.size()) throw Error("usage", "the bytes are not those of the shape");
  }
  const Dtype dtype = dtype_argument(dtype_name);
  DecodeForm form;
  if (auto problem = prepare_decoding(kernel, parts, Shape(extents), dtype, form)) {
    throw Error("plan.recipe", problem->message,
                {.found = problem->found, .expected = problem->expected});
  }
  std::vector<std::byte> target(form.elements * element_bytes(dtype));
  decode(form, 0, form.elements, static_cast<const std::byte*>(std::get<0>(rows[0]).data()),
         static_cast<const std::byte*>(std::get<0>(rows[1]).data()), target.data());
  return nb::bytes(target.data(), target.size());
}

}  // namespace

void bind_kernels(nb::module_& module) {
  module.def("cast", &cast_bytes, nb::arg("source"), nb::arg("source_dtype"),
             nb::arg("target_dtype"));
  module.def("decode", &decode_bytes, nb::arg("kernel"), nb::arg("sources"), nb::arg("shape"),
             nb::arg("dtype"));
  module.def("can_cast", [](std::string_view source, std::string_view target) {
    return can_cast(dtype_argument(source), dtype_argument(target));
  });
}

}  // namespace loadstone::python
