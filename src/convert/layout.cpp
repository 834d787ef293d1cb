#include "convert/layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.h"
#include "convert/container.h"
#include "convert/gguf_file_type.h"
#include "convert/quantize_style.h"
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

}  // namespace loadstone
