// Binds the encoders and decoders of the formats of NVIDIA ModelOpt and of MX, which use the
// caller's buffers.
#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "bindings.h"
#include "buffers.h"
#include "codec/encode.h"
#include "kernels/quantize.h"

namespace loadstone::python {

namespace {

using Importance = std::optional<std::vector<float>>;

QuantizedLayout form_for(const std::string& encoding, const std::string& dialect,
                         const Extents& extents, std::string_view dtype,
                         const Importance& importance = std::nullopt) {
  QuantizedLayout form;
  Quantization quantization = {.encoding = encoding, .dialect = dialect, .nested_offset = {}};
  if (importance) {
    quantization.importance = std::make_shared<const std::vector<float>>(*importance);
  }
  auto problem = prepare_quantization(quantization, Shape(extents), dtype_argument(dtype), form);
  if (!problem && is_bitsandbytes(form.kind)) {
    problem = Problem{"an encoding of bitsandbytes", encoding};
  }
  if (problem) throw_problem("plan.quantize", *problem, {.field = "quantize"});
  return form;
}

template <class Bytes>
void require_parts(const QuantizedLayout& form, const std::vector<Bytes>& parts) {
  require_bytes("parts", parts.size(), form.parts.size());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    require_bytes(form.parts[i].name, parts[i].size(), form.parts[i].byte_count());
  }
}

// Returns the name, shape and dtype of each component.
nb::list parts_of(const std::string& encoding, const std::string& dialect, const Extents& extents,
                  std::string_view dtype, const Importance& importance) {
  nb::list rows;
  for (const auto& part : form_for(encoding, dialect, extents, dtype, importance).parts) {
    rows.append(
        nb::make_tuple(part.name, nb::cast(part.shape.extents()), std::string(name(part.dtype))));
  }
  return rows;
}

// Returns the largest finite magnitude of each matrix.
std::vector<float> measure(const std::string& encoding, const std::string& dialect,
                           const Extents& extents, const SourceBytes& numbers,
                           std::string_view dtype) {
  const QuantizedLayout form = form_for(encoding, dialect, extents, dtype);
  require_bytes("numbers", numbers.size(), form.elements * bits(form.dtype) / 8);
  std::vector<float> amax(form.stack);
  const nb::gil_scoped_release release;
  (void)measure_window(form, 0, form.elements, bytes_of(numbers), amax);
  return amax;
}

// Returns the index of the first non-finite value, or the number of values if all are finite.
std::uint64_t encode(const std::string& encoding, const std::string& dialect,
                     const Extents& extents, const SourceBytes& numbers, std::string_view dtype,
                     const std::vector<float>& amax, const std::vector<TargetBytes>& parts,
                     const Importance& importance) {
  const QuantizedLayout form = form_for(encoding, dialect, extents, dtype, importance);
  require_bytes("numbers", numbers.size(), form.elements * bits(form.dtype) / 8);
  require_bytes("amax", amax.size(), form.needs_amax ? form.stack : 0);
  require_parts(form, parts);
  std::vector<std::byte*> places;
  for (const TargetBytes& part : parts) {
    places.push_back(bytes_of(part));
  }
  const nb::gil_scoped_release release;
  const std::uint64_t good =
      quantize_window(form, 0, form.elements, bytes_of(numbers), places, amax, nullptr);
  finish_quantized(form, places, amax, nullptr);
  return good;
}

// `dtype` is the dtype of the values before they were encoded, which may determine the dtype of the
// scales.
void decode(const std::string& encoding, const std::string& dialect, const Extents& extents,
            std::string_view dtype, const std::vector<SourceBytes>& parts,
            const TargetBytes& numbers, std::string_view target) {
  const QuantizedLayout form = form_for(encoding, dialect, extents, dtype);
  const Dtype to = dtype_argument(target);
  if (to != Dtype::f32 && to != Dtype::f16 && to != Dtype::bf16) {
    throw Error("plan.dtype", "loadstone cannot decode this encoding to this dtype",
                {.found = std::string(target)});
  }
  require_bytes("numbers", numbers.size(), form.elements * bits(to) / 8);
  require_parts(form, parts);
  std::vector<const std::byte*> places;
  for (const SourceBytes& part : parts) {
    places.push_back(bytes_of(part));
  }
  const nb::gil_scoped_release release;
  dequantize_window(form, 0, form.elements, places, to, bytes_of(numbers));
}

}  // namespace

void bind_scaled(nb::module_& module) {
  nb::module_ scaled = module.def_submodule("scaled", "The formats of ModelOpt, and MX.");
  scaled.def("parts_of", &parts_of, nb::arg("encoding"), nb::arg("dialect"), nb::arg("shape"),
             nb::arg("dtype"), nb::arg("importance") = nb::none());
  scaled.def("measure", &measure, nb::arg("encoding"), nb::arg("dialect"), nb::arg("shape"),
             nb::arg("numbers"), nb::arg("dtype"));
  scaled.def("encode", &encode, nb::arg("encoding"), nb::arg("dialect"), nb::arg("shape"),
             nb::arg("numbers"), nb::arg("dtype"), nb::arg("amax"), nb::arg("parts"),
             nb::arg("importance") = nb::none());
  scaled.def("decode", &decode, nb::arg("encoding"), nb::arg("dialect"), nb::arg("shape"),
             nb::arg("dtype"), nb::arg("parts"), nb::arg("numbers"), nb::arg("target"));
}

}  // namespace loadstone::python
