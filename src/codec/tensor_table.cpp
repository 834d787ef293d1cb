#include "codec/tensor_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/text.h"

namespace loadstone {

std::uint32_t TensorTable::find_any(const std::string& stem,
                                    std::initializer_list<std::string_view> suffixes) const {
  for (const std::string_view suffix : suffixes) {
    if (const auto index = find(stem + std::string(suffix)); index != none) return index;
  }
  return none;
}

std::string TensorTable::bytes_of(std::uint32_t index, std::uint64_t bytes_max) const {
  const TensorInfo& tensor = tensors()[index];
  if (tensor.byte_count() > bytes_max || !tensor.strides.empty()) {
    throw Error("q.quant_state", "the tensor is too large to be a quant_state or a table of codes",
                {.tensor = tensor.name,
                 .found = human_bytes(tensor.byte_count()),
                 .expected = human_bytes(bytes_max)});
  }
  return read(index, tensor.byte_count());
}

std::vector<std::int64_t> TensorTable::integers_of(std::uint32_t index,
                                                   std::uint64_t bytes_max) const {
  if (!is_dtype(tensors()[index], {Dtype::i8, Dtype::i32, Dtype::i64})) {
    throw Error("q.dtype", "the tensor has the wrong dtype or number of integers",
                {.tensor = tensors()[index].name,
                 .found = std::string(tensors()[index].encoding.name()),
                 .expected = "I8, I32 or I64"});
  }
  const std::string bytes = bytes_of(index, bytes_max);
  const Dtype dtype = tensors()[index].encoding.dtype();
  const std::size_t size = element_bytes(dtype);
  std::vector<std::int64_t> integers(bytes.size() / size);
  for (std::size_t i = 0; i < integers.size(); ++i) {
    const char* const from = bytes.data() + i * size;
    if (dtype == Dtype::i64) {
      std::memcpy(&integers[i], from, sizeof(std::int64_t));
    } else if (dtype == Dtype::i32) {
      std::int32_t word = 0;
      std::memcpy(&word, from, sizeof(word));
      integers[i] = word;
    } else {
      integers[i] = static_cast<std::int8_t>(*from);
    }
  }
  return integers;
}

bool is_dtype(const TensorInfo& tensor, std::initializer_list<Dtype> dtypes) noexcept {
  return std::ranges::any_of(dtypes,
                             [&](Dtype dtype) { return tensor.encoding == Encoding(dtype); });
}

bool is_fp8(const TensorInfo& tensor) noexcept {
  return is_dtype(tensor, {Dtype::f8_e4m3, Dtype::f8_e5m2});
}

bool is_foreign_float(const TensorInfo& tensor) noexcept {
  if (!tensor.encoding.is_dtype()) return false;
  const DtypeInfo& dtype = dtype_info(tensor.encoding.dtype());
  return dtype.kind == DtypeKind::floating && !dtype.has_casts;
}

std::string without_suffix(const std::string& name, std::string_view suffix) {
  return name.substr(0, name.size() - suffix.size());
}

QuantizedTensor quantized_tensor(std::string name, std::uint32_t data,
                                 std::initializer_list<std::uint32_t> scales) {
  QuantizedTensor made = {.name = std::move(name), .data = data};
  for (const std::uint32_t scale : scales) {
    if (scale != TensorTable::none) made.scales.push_back(scale);
  }
  return made;
}

void refuse(QuantizedTensor& quantized, std::string code, std::string_view what,
            std::vector<std::string> sources, std::string found, std::string expected) {
  quantized.decoding = {};
  quantized.encoding.clear();
  std::string message = fmt::format("'{}' {}", printable(quantized.name), what);
  if (!sources.empty()) message += " (" + name_list(sources) + ")";
  quantized.defect = {.severity = Severity::error,
                      .code = std::move(code),
                      .target = quantized.name,
                      .sources = std::move(sources),
                      .message = std::move(message),
                      .found = std::move(found),
                      .expected = std::move(expected)};
}

void refuse(QuantizedTensor& quantized, const Error& error, const std::string& component) {
  const Where& where = error.where();
  refuse(quantized, error.code(), (where.field.empty() ? "" : where.field + ": ") + error.message(),
         {where.tensor.empty() ? component : where.tensor}, where.found, where.expected);
}

std::optional<Problem> check_decoding(const std::vector<TensorInfo>& tensors,
                                      const Decoding& decoding, PreparedDecoder& form) {
  std::vector<DecodePart> parts;
  parts.reserve(decoding.sources.size());
  for (const std::uint32_t source : decoding.sources) {
    if (source >= tensors.size()) {
      return Problem{"a source of the decoding does not exist", fmt::format("source {}", source),
                     fmt::format("one of {}", tensors.size())};
    }
    if (!tensors[source].strides.empty()) {
      return Problem{"a tensor to decode is not contiguous",
                     "'" + printable(tensors[source].name) + "', a view with strides",
                     "a contiguous tensor"};
    }
    parts.push_back({tensors[source].encoding, tensors[source].shape});
  }
  return prepare_decoding(decoding.kernel, parts, decoding.shape, decoding.dtype, decoding.offset,
                          form, decoding.group_size);
}

void set_decoding(const TensorTable& table, QuantizedTensor& quantized, std::string_view encoding,
                  Decoding decoding) {
  PreparedDecoder form;
  const auto problem = check_decoding(table.tensors(), decoding, form);
  if (!problem) {
    quantized.encoding = encoding;
    quantized.decoding = std::move(decoding);
    return;
  }
  std::vector<std::string> sources;
  for (const std::uint32_t source : decoding.sources) sources.push_back(table[source].name);
  std::ranges::rotate(sources, sources.begin() + 1);  // names the scales first: they do not fit
  refuse(quantized, "q.scale_shape", "cannot be decoded: " + problem->message, std::move(sources),
         problem->found, problem->expected);
}

}  // namespace loadstone
