// Binds the encoders and decoders of bitsandbytes' formats, which use the caller's buffers.
#include "kernels/bnb.h"

#include <cmath>

#include "bindings.h"
#include "buffers.h"
#include "codec/bnb/state.h"
#include "codec/bnb/weights.h"
#include "kernels/bnb_parts.h"
#include "kernels/cast.h"
#include "kernels/modelopt/scales.h"

namespace loadstone::python {

namespace {

Dtype number_dtype(std::string_view text) {
  const Dtype dtype = dtype_argument(text);
  if (dtype == Dtype::f32 || dtype == Dtype::f16 || dtype == Dtype::bf16) return dtype;
  throw Error("plan.dtype", "weights cannot be quantized from, or decoded to, this dtype",
              {.field = "dtype", .found = std::string(text), .expected = "F32, F16 or BF16"});
}

BnbDialect dialect_argument(std::string_view text) {
  if (const auto dialect = from_name<BnbDialect>(text)) return *dialect;
  throw Error(
      "usage", "the dialect is unknown",
      {.field = "dialect", .found = std::string(text), .expected = either(names_of<BnbDialect>())});
}

BnbEncoding encoding_argument(std::string_view text) {
  if (const auto encoding = from_name<BnbEncoding>(text)) return *encoding;
  throw Error("plan.encoding", "this is not an encoding of bitsandbytes",
              {.found = std::string(text), .expected = either(names_of<BnbEncoding>())});
}

Bnb4 form_argument(std::string_view encoding_name, std::string_view dialect,
                   std::uint64_t block_size) {
  const auto code = bnb4_code(encoding_argument(encoding_name));
  if (!code) {
    throw Error("plan.encoding", "this encoding has no blocks",
                {.found = std::string(encoding_name), .expected = "nf4 or fp4"});
  }
  if (!is_bnb_block_size(block_size)) {
    throw Error("q.group_size", "bitsandbytes does not support this block size",
                {.field = "block_size",
                 .found = std::to_string(block_size),
                 .expected = "32, 64, 128, 256, 512, 1024, 2048 or 4096"});
  }
  return {.code = *code,
          .dialect = dialect_argument(dialect),
          .block_size = static_cast<std::uint32_t>(block_size)};
}

void require_sizes(const Bnb4& form, std::uint64_t count, std::uint64_t data,
                   std::uint64_t absmax) {
  require_bytes("data", data, count / 2 + count % 2);
  require_bytes("absmax", absmax, (count + form.block_size - 1) / form.block_size * 4);
}

// Returns the index of the first non-finite value, or the number of values if all are finite.
std::uint64_t encode_4bit(std::string_view encoding, std::string_view dialect,
                          std::uint64_t block_size, const SourceBytes& numbers,
                          std::string_view dtype, const TargetBytes& data,
                          const TargetBytes& absmax) {
  const Bnb4 form = form_argument(encoding, dialect, block_size);
  const Dtype source = number_dtype(dtype);
  const std::uint64_t count = numbers.size() / element_bytes(source);
  require_bytes("numbers", numbers.size(), count * element_bytes(source));
  require_sizes(form, count, data.size(), absmax.size());
  const nb::gil_scoped_release release;
  return encode_bnb4(form, source, bytes_of(numbers), count, bytes_of(data), bytes_of(absmax));
}

void decode_4bit(std::string_view encoding, std::uint64_t block_size, const SourceBytes& data,
                 const SourceBytes& absmax, const TargetBytes& numbers, std::string_view dtype) {
  const Bnb4 form = form_argument(encoding, "bnb-cpu", block_size);
  const Dtype target = number_dtype(dtype);
  const std::uint64_t count = numbers.size() / element_bytes(target);
  require_bytes("numbers", numbers.size(), count * element_bytes(target));
  require_sizes(form, count, data.size(), absmax.size());
  const nb::gil_scoped_release release;
  decode_bnb4(form, 0, count, bytes_of(data), bytes_of(absmax), target, bytes_of(numbers));
}

float nested_offset(const SourceBytes& absmax) {
  require_bytes("absmax", absmax.size(), absmax.size() / 4 * 4);
  return bnb_nested_offset(bytes_of(absmax), absmax.size() / 4);
}

void raise(const std::optional<BnbProblem>& problem) {
  if (!problem) return;
  throw Error(problem->code, problem->message,
              {.field = problem->part, .found = problem->found, .expected = problem->expected});
}

std::uint64_t nested_bytes(std::uint64_t count) {
  return (count + bnb_nested_block_size - 1) / bnb_nested_block_size * 4;
}

void encode_nested(std::string_view dialect, const SourceBytes& absmax, float offset,
                   std::string_view dtype, const TargetBytes& data,
                   const TargetBytes& nested_absmax) {
  const std::uint64_t count = data.size();
  require_bytes("absmax", absmax.size(), count * 4);
  require_bytes("nested_absmax", nested_absmax.size(), nested_bytes(count));
  raise(check_bnb_scales("absmax", bytes_of(absmax), count));
  if (!std::isfinite(offset)) throw Error("q.nan", "the offset is not finite");
  const BnbDialect chosen = dialect_argument(dialect);
  const float most = scaled::most_finite(dtype_argument(dtype));
  const nb::gil_scoped_release release;
  encode_bnb_nested(chosen, bytes_of(absmax), count, offset, most, bytes_of(data),
                    bytes_of(nested_absmax));
}

void decode_nested(const SourceBytes& data, const SourceBytes& nested_absmax,
                   const SourceBytes& map, float offset, const TargetBytes& absmax) {
  const std::uint64_t count = data.size();
  require_bytes("absmax", absmax.size(), count * 4);
  require_bytes("nested_absmax", nested_absmax.size(), nested_bytes(count));
  require_bytes("nested_code", map.size(), 256 * 4);
  const nb::gil_scoped_release release;
  decode_bnb_nested(0, count, bytes_of(data), bytes_of(nested_absmax), bytes_of(map), offset,
                    bytes_of(absmax));
}

// Returns the number of rows of a matrix with `count` elements and `columns` columns.
std::uint64_t rows_of(std::uint64_t count, std::uint64_t columns, std::uint64_t scales) {
  if (columns == 0) {
    require_bytes("data", count, 0);
    return scales / 4;
  }
  require_bytes("data", count, count / columns * columns);
  require_bytes("absmax", scales, count / columns * 4);
  return count / columns;
}

std::uint64_t encode_int8(std::string_view dialect, std::uint64_t columns,
                          const SourceBytes& numbers, std::string_view dtype,
                          const TargetBytes& data, const TargetBytes& absmax) {
  const Dtype source = number_dtype(dtype);
  const BnbDialect chosen = dialect_argument(dialect);
  const std::uint64_t rows = rows_of(data.size(), columns, absmax.size());
  require_bytes("numbers", numbers.size(), data.size() * element_bytes(source));
  require_bytes("absmax", absmax.size(), rows * 4);
  const nb::gil_scoped_release release;
  return encode_bnb_int8(chosen, source, bytes_of(numbers), rows, columns, bytes_of(data),
                         bytes_of(absmax));
}

void decode_int8(std::uint64_t columns, const SourceBytes& data, const SourceBytes& absmax,
                 const TargetBytes& numbers, std::string_view dtype) {
  const Dtype target = number_dtype(dtype);
  rows_of(data.size(), columns, absmax.size());
  require_bytes("numbers", numbers.size(), data.size() * element_bytes(target));
  const nb::gil_scoped_release release;
  decode_bnb_int8(0, data.size(), columns, bytes_of(data), bytes_of(absmax), target,
                  bytes_of(numbers));
}

// Returns the shape, the torch name of the dtype, the block size and the nested offset. `name` is
// the name of the tensor.
nb::tuple parse_state(const std::string& name, const nb::bytes& blob) {
  const BnbState state = parse_bnb_state({blob.c_str(), blob.size()}, name);
  return nb::make_tuple(nb::tuple(nb::cast(state.shape.extents())),
                        dtype_info(state.dtype).torch_name, state.block_size, state.nested_offset);
}

// Name, dtype and shape of a component.
using NamedPartRow = std::tuple<std::string, std::string_view, Extents>;

void check_parts(std::string_view encoding, const Extents& extents, std::uint64_t block_size,
                 const std::vector<NamedPartRow>& rows) {
  std::vector<BnbPart> parts;
  for (const auto& [name, dtype, shape] : rows) {
    parts.push_back({name, dtype_argument(dtype), Shape(shape)});
  }
  raise(check_bnb_parts(encoding_argument(encoding), Shape(extents), block_size, parts));
}

void check_scales(std::string_view part, const SourceBytes& scales) {
  raise(check_bnb_scales(part, bytes_of(scales), scales.size() / 4));
}

void check_code(std::string_view encoding, const SourceBytes& values) {
  const Bnb4 form = form_argument(encoding, "bnb-cpu", 64);
  require_bytes("code", values.size(), 16 * 4);
  raise(check_bnb_code(form.code, bytes_of(values)));
}

void check_nested_code(const SourceBytes& values) {
  require_bytes("nested_code", values.size(), 256 * 4);
  raise(check_bnb_nested_code(bytes_of(values)));
}

nb::bytes table(std::string_view name) {
  if (name == "map") return nb::bytes(bnb_dynamic_map().data(), 256 * sizeof(float));
  const auto values = bnb4_values(form_argument(name, "bnb-cpu", 64).code);
  return nb::bytes(values.data(), values.size_bytes());
}

}  // namespace

void bind_bnb(nb::module_& module) {
  nb::module_ bnb = module.def_submodule("bnb", "The formats of bitsandbytes.");
  bnb.attr("ENCODINGS") = nb::tuple(nb::cast(names_of<BnbEncoding>()));
  bnb.attr("NESTED_BLOCK_SIZE") = bnb_nested_block_size;
  bnb.attr("STATE_BYTES_MAX") = bnb_state_bytes_max;
  bnb.def("encode_4bit", &encode_4bit, nb::arg("encoding"), nb::arg("dialect"),
          nb::arg("block_size"), nb::arg("numbers"), nb::arg("dtype"), nb::arg("data"),
          nb::arg("absmax"));
  bnb.def("decode_4bit", &decode_4bit, nb::arg("encoding"), nb::arg("block_size"), nb::arg("data"),
          nb::arg("absmax"), nb::arg("numbers"), nb::arg("dtype"));
  bnb.def("nested_offset", &nested_offset, nb::arg("absmax"));
  bnb.def("encode_nested", &encode_nested, nb::arg("dialect"), nb::arg("absmax"), nb::arg("offset"),
          nb::arg("dtype"), nb::arg("data"), nb::arg("nested_absmax"));
  bnb.def("decode_nested", &decode_nested, nb::arg("data"), nb::arg("nested_absmax"),
          nb::arg("nested_code"), nb::arg("offset"), nb::arg("absmax"));
  bnb.def("encode_int8", &encode_int8, nb::arg("dialect"), nb::arg("columns"), nb::arg("numbers"),
          nb::arg("dtype"), nb::arg("data"), nb::arg("absmax"));
  bnb.def("decode_int8", &decode_int8, nb::arg("columns"), nb::arg("data"), nb::arg("absmax"),
          nb::arg("numbers"), nb::arg("dtype"));
  bnb.def("parse_state", &parse_state, nb::arg("name"), nb::arg("blob"));
  bnb.def("check_parts", &check_parts, nb::arg("encoding"), nb::arg("shape"), nb::arg("block_size"),
          nb::arg("parts"));
  bnb.def("check_scales", &check_scales, nb::arg("part"), nb::arg("scales"));
  bnb.def("check_code", &check_code, nb::arg("encoding"), nb::arg("values"));
  bnb.def("check_nested_code", &check_nested_code, nb::arg("values"));
  bnb.def("table", &table, nb::arg("name"));
}

}  // namespace loadstone::python
