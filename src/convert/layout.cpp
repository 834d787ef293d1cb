#include "convert/layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/only_errors.h"
#include "base/refuse_option.h"
#include "base/text.h"
#include "convert/container.h"
#include "convert/gguf_mix.h"
#include "convert/quantize_style.h"
#include "formats/metadata.h"
#include "loadstone/name_hash.h"

namespace loadstone {

namespace {

// Targets that go into one file together: partners where the first of them stands, or one alone.
std::vector<std::vector<std::uint32_t>> units_of(const Plan& plan) {
  std::vector<std::vector<std::uint32_t>> units;
  std::map<std::string_view, std::size_t> unit_of;
  for (std::uint32_t i = 0; i < plan.targets.size(); ++i) {
    const PlannedTarget& target = plan.targets[i];
    if (target.quantization && !target.quantization->group.empty()) {
      const auto [known, is_new] = unit_of.emplace(target.quantization->group, units.size());
      if (!is_new) {
        units[known->second].push_back(i);
        continue;
      }
    }
    units.push_back({i});
  }
  return units;
}

void fill_files(Conversion& conversion, const ConvertOptions& options) {
  const Container& container = container_of(conversion.format);
  Plan& plan = conversion.plan;
  const QuantizeStyle style = container.style(options);
  conversion.files.emplace_back();
  for (const auto& unit : units_of(plan)) {
    std::uint64_t bytes = 0;
    std::vector<OutputTensor> tensors;
    for (const std::uint32_t i : unit) {
      for (OutputTensor& tensor : output_tensors(conversion, plan.targets[i], style)) {
        tensor.target = i;
        tensor.end = tensor.encoding.byte_count(tensor.shape.numel().value_or(0)).value_or(0);
        if (auto finding = container.refuse(tensor, options)) {
          plan.findings.push_back(*std::move(finding));
        }
        bytes += tensor.end;
        tensors.push_back(std::move(tensor));
      }
    }
    const OutputFile& last = conversion.files.back();
    const bool fits = last.tensors.empty() || (last.data_bytes <= options.shard_bytes_max &&
                                               bytes <= options.shard_bytes_max - last.data_bytes);
    if (!conversion.one_file && !fits) conversion.files.emplace_back();
    OutputFile& file = conversion.files.back();
    std::ranges::move(tensors, std::back_inserter(file.tensors));
    file.data_bytes += bytes;
  }
}

// A part may have the name of another tensor.
void check_names(Conversion& conversion) {
  NameSet names;
  for (const OutputFile& file : conversion.files) {
    for (const OutputTensor& tensor : file.tensors) {
      if (names.insert(tensor.name).second) continue;
      conversion.plan.findings.push_back(
          {.severity = Severity::error,
           .code = "plan.duplicate",
           .target = tensor.name,
           .message = fmt::format("'{}' would be a part of a quantized tensor and another tensor",
                                  printable(tensor.name)),
           .suggestion = "rename or --exclude one of them"});
    }
  }
}

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

// Corrects a general.file_type that came from the source and is not true of the output's tensors;
// removes it where no file type is. One that the caller gave, or a mix has set, stays.
void settle_file_type(const ConvertOptions& options, Conversion& conversion) {
  const Metadata& before = conversion.plan.catalog->metadata();
  const auto source = before.find(file_type_key);
  const auto found = conversion.metadata.find(file_type_key);
  if (source == before.end() || found == conversion.metadata.end()) return;
  const bool is_settled = text_of(source->second) != text_of(found->second);
  if (is_settled || options.metadata.contains(file_type_key)) return;
  MainEncoding of_source;
  for (const TensorInfo& tensor : conversion.plan.catalog->tensors()) {
    of_source.add(tensor.encoding, tensor.shape);
  }
  MainEncoding of_output;
  for (const OutputFile& file : conversion.files) {
    for (const OutputTensor& tensor : file.tensors) of_output.add(tensor.encoding, tensor.shape);
  }
  const std::string_view main = of_output.name();
  const bool is_gguf = source->second.type != MetadataType::string;
  if (is_gguf && main == of_source.name()) return;
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

// Warns of vectors of a language model that get a dtype in which llama.cpp does not compute them.
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

}  // namespace

void lay_out(Conversion& conversion, const ConvertOptions& options) {
  fill_files(conversion, options);
  settle_file_type(options, conversion);
  if (conversion.format == FileFormat::gguf) tell_narrow_vectors(options, conversion);
  if (!options.quantize.formats.empty()) check_names(conversion);
  const Container& container = container_of(conversion.format);
  if (conversion.files.size() > 1 && !container.index_suffix().empty()) {
    conversion.index_name = conversion.stem + std::string(container.index_suffix());
  }
  if (conversion.is_split && conversion.files.size() == 1) {
    conversion.is_split = false;
    conversion.one_file = true;
  }
  for (std::size_t f = 0; f < conversion.files.size(); ++f) {
    OutputFile& file = conversion.files[f];
    if (!conversion.one_file) {
      file.name = container.shard_name(conversion.stem, f, conversion.files.size());
    }
    container.place(conversion, file);
    file.header_bytes = container.header(conversion, f).size();
    conversion.bytes_to_write += file.byte_count();
    if (auto finding = container.refuse_header(file)) {
      conversion.plan.findings.push_back(*std::move(finding));
    }
  }
}

// The largest first, each to the share that has least so far.
static std::vector<std::uint32_t> share_of(const Conversion& conversion, const ConvertPart& part) {
  if (part.count == 0 || part.index == 0 || part.index > part.count) {
    refuse_option("part", "a part is one of 1 to as many as there are");
  }
  const auto& files = conversion.files;
  std::vector<std::uint32_t> order(files.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::ranges::greater(),
                           [&](std::uint32_t file) { return files[file].byte_count(); });
  // More shares than files have nothing to do.
  std::vector<std::uint64_t> bytes(std::min<std::size_t>(part.count, files.size()), 0);
  std::vector<std::uint32_t> mine;
  for (const std::uint32_t file : order) {
    const auto least = std::ranges::min_element(bytes);
    *least += files[file].byte_count();
    if (least - bytes.begin() == part.index - 1) mine.push_back(file);
  }
  std::ranges::sort(mine);
  return mine;
}

std::vector<std::uint32_t> files_of_part(const Conversion& conversion, const ConvertPart& part) {
  return only_errors([&] { return share_of(conversion, part); });
}

}  // namespace loadstone
