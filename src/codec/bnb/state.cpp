#include "codec/bnb/state.h"

#include <fmt/format.h>

#include <cmath>
#include <cstddef>
#include <vector>

#include "base/json_fields.h"
#include "base/text.h"
#include "kernels/bnb_parts.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

constexpr std::string_view code = "q.quant_state";

[[noreturn]] void refuse(const std::string& name, const char* why, const char* field,
                         std::string found) {
  throw Error(std::string(code), why, {.tensor = name, .field = field, .found = std::move(found)});
}

BnbState parse(std::string_view text, const std::string& name) {
  const JsonDocument document(text, code, bnb_state_bytes_max);
  const JsonReader reader(code);
  const JsonPlace top;
  JsonObject fields(reader, document.root(), top);
  BnbState state;
  const std::string type(reader.string(fields.required("quant_type"), fields.at("quant_type")));
  if (!name.ends_with("bitsandbytes__" + type)) {
    refuse(name, "the quant type differs from the one in the tensor's name", "quant_type",
           printable(type));
  }
  std::vector<std::uint64_t> extents;
  const JsonPlace shape_place = fields.at("shape");
  for (const auto extent : reader.array(fields.required("shape"), shape_place)) {
    extents.push_back(reader.unsigned_number(extent, shape_place));
  }
  state.shape = Shape(std::move(extents));
  const std::string dtype(reader.string(fields.required("dtype"), fields.at("dtype")));
  const auto known = parse_dtype(dtype);
  if (!known || (*known != Dtype::bf16 && *known != Dtype::f16 && *known != Dtype::f32)) {
    refuse(name, "loadstone cannot decode to this dtype", "dtype", printable(dtype));
  }
  state.dtype = *known;
  state.block_size = reader.unsigned_number(fields.required("blocksize"), fields.at("blocksize"));
  if (!is_bnb_block_size(state.block_size)) {
    throw Error("q.group_size", "bitsandbytes does not support this block size",
                {.tensor = name,
                 .field = "blocksize",
                 .found = std::to_string(state.block_size),
                 .expected = "32, 64, 128 ... 4096"});
  }
  const auto nested = fields.optional("nested_offset");
  if (!nested) return state;
  double offset = 0;
  if (nested->get_double().get(offset) != simdjson::SUCCESS) {
    refuse(name, "the offset of nested scales is not finite", "nested_offset", {});
  }
  state.nested_offset = static_cast<float>(offset);
  if (!std::isfinite(*state.nested_offset)) {
    refuse(name, "the offset of nested scales is too large for F32", "nested_offset",
           fmt::format("{}", offset));
  }
  const auto size =
      reader.unsigned_number(fields.required("nested_blocksize"), fields.at("nested_blocksize"));
  if (size != bnb_nested_block_size) {
    refuse(name, "loadstone does not support this block size of nested scales", "nested_blocksize",
           std::to_string(size));
  }
  return state;
}

void require_table(const TensorInfo& tensor, std::string_view bytes, std::size_t size) {
  const bool fits = tensor.encoding == Encoding(Dtype::f32) && tensor.shape == Shape({size});
  if (fits && bytes.size() == size * sizeof(float)) return;
  throw Error("q.scale_shape", "the tensor is not a table of codes",
              {.tensor = tensor.name,
               .found = fmt::format("{} {}", tensor.encoding.name(), tensor.shape.text()),
               .expected = fmt::format("F32 [{}]", size)});
}

void raise(const TensorInfo& tensor, const std::optional<BnbProblem>& problem) {
  if (!problem) return;
  throw Error(problem->code, problem->message,
              {.tensor = tensor.name, .found = problem->found, .expected = problem->expected});
}

}  // namespace

void check_bnb_map(const TensorInfo& tensor, std::string_view bytes, Bnb4Code code) {
  require_table(tensor, bytes, bnb4_values(Bnb4Code::nf4).size());
  const auto* const values = reinterpret_cast<const std::byte*>(bytes.data());
  raise(tensor, check_bnb_code(code, values));
}

void check_bnb_nested_map(const TensorInfo& tensor, std::string_view bytes) {
  require_table(tensor, bytes, bnb_dynamic_map().size());
  raise(tensor, check_bnb_nested_code(reinterpret_cast<const std::byte*>(bytes.data())));
}

std::string bnb_state_text(std::string_view type, const BnbState& state) {
  return fmt::format(R"({{"quant_type": "{}", "blocksize": {}, "dtype": "{}", "shape": [{}]}})",
                     type, state.block_size, dtype_info(state.dtype).torch_name,
                     fmt::join(state.shape.extents(), ", "));
}

BnbState parse_bnb_state(std::string_view text, const std::string& name) {
  try {
    return parse(text, name);
  } catch (const Error& error) {
    if (!error.where().tensor.empty()) throw;
    Where where = error.where();
    where.tensor = name;
    throw Error(error.code(), error.message(), std::move(where));
  }
}

}  // namespace loadstone
