#include "convert/gguf_file_type.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/text.h"
#include "convert/gguf_mix.h"
#include "formats/metadata.h"

namespace loadstone {

namespace {

constexpr const char* file_type_key = "general.file_type";

// Finds the encoding of most values in matrices.
class MainEncoding {
 public:
  void add(const Encoding& encoding, const Shape& shape) {
    if (shape.rank() >= 2) counts_[encoding.name()] += shape.numel().value_or(0);
  }
  // Empty without a matrix.
  [[nodiscard]] std::string_view name() const {
    const auto most = std::ranges::max_element(counts_, {}, [](const auto& c) { return c.second; });
    return most == counts_.end() ? std::string_view() : most->first;
  }

 private:
  std::map<std::string_view, std::uint64_t> counts_;
};

std::string_view source_encoding(const Catalog& catalog) {
  MainEncoding main;
  for (const TensorInfo& tensor : catalog.tensors()) main.add(tensor.encoding, tensor.shape);
  return main.name();
}

std::string_view output_encoding(const Conversion& conversion) {
  MainEncoding main;
  for (const OutputFile& file : conversion.files) {
    for (const OutputTensor& tensor : file.tensors) main.add(tensor.encoding, tensor.shape);
  }
  return main.name();
}

}  // namespace

void settle_file_type(const ConvertOptions& options, Conversion& conversion) {
  const Metadata& before = conversion.plan.catalog->metadata();
  const auto source = before.find(file_type_key);
  const auto found = conversion.metadata.find(file_type_key);
  if (source == before.end() || found == conversion.metadata.end()) return;
  const bool is_settled = text_of(source->second) != text_of(found->second);
  if (is_settled || options.metadata.contains(file_type_key)) return;
  const std::string_view main = output_encoding(conversion);
  const bool is_gguf = source->second.type != MetadataType::string;
  if (is_gguf && main == source_encoding(*conversion.plan.catalog)) return;
  std::vector<std::uint64_t> file_types;
  for (const std::string& name : mix_names()) {
    const MixInfo& mix = info(*find_mix(name));
    if (mix.type.name() == main) file_types.push_back(mix.file_type);
  }
  const auto is_told = [&](std::uint64_t type) {
    return text_of(found->second) == std::to_string(type);
  };
  const bool is_text = conversion.format != FileFormat::gguf;
  if (file_types.empty()) {
    conversion.metadata.erase(found);
  } else if (is_text && std::ranges::none_of(file_types, is_told)) {
    found->second = {.value = std::to_string(file_types.front())};
  } else if (!is_text) {
    const auto known = std::ranges::find_if(file_types, is_told);
    found->second = {.value = known == file_types.end() ? file_types.front() : *known,
                     .type = MetadataType::u32};
  }
}

void tell_narrow_vectors(const ConvertOptions& options, Conversion& conversion) {
  if (!options.dtype || *options.dtype == Dtype::f32 || !mix_model(conversion.metadata)) return;
  std::vector<std::string> names;
  for (const OutputFile& file : conversion.files) {
    for (const OutputTensor& tensor : file.tensors) {
      const bool is_narrow = tensor.encoding == Encoding(*options.dtype);
      if (tensor.shape.rank() == 1 && is_narrow) names.push_back(tensor.name);
    }
  }
  if (names.empty()) return;
  conversion.plan.findings.push_back(
      {.severity = Severity::warning,
       .code = "convert.unread",
       .sources = names,
       .message = fmt::format("llama.cpp needs vectors and norms in F32, and {} {} {}: {}",
                              counted(names.size(), "tensor"), names.size() == 1 ? "gets" : "get",
                              name(*options.dtype), name_list(names)),
       .suggestion = "--quantize f16 or bf16 in place of --dtype leaves them in F32"});
}

}  // namespace loadstone
