#include "convert/layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.h"
#include "convert/header.h"
#include "convert/quantize_style.h"
#include "formats/safetensors.h"
#include "loadstone/name_hash.h"

namespace loadstone {

namespace {

std::string file_name(const std::string& stem, std::size_t index, std::size_t count) {
  if (count == 1) return stem + ".safetensors";
  return fmt::format("{}-{:05}-of-{:05}.safetensors", stem, index + 1, count);
}

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
  const Plan& plan = conversion.plan;
  const QuantizeStyle style = options.quantize.style.value_or(QuantizeStyle::unified);
  conversion.files.emplace_back();
  for (const auto& unit : units_of(plan)) {
    std::uint64_t bytes = 0;
    std::vector<OutputTensor> tensors;
    for (const std::uint32_t i : unit) {
      for (OutputTensor& tensor : output_tensors(plan.targets[i], style)) {
        tensor.target = i;
        tensor.end =
            Encoding(tensor.dtype).byte_count(tensor.shape.numel().value_or(0)).value_or(0);
        bytes += tensor.end;
        tensors.push_back(std::move(tensor));
      }
    }
    const OutputFile& last = conversion.files.back();
    const bool fits = last.tensors.empty() || (last.data_bytes <= options.shard_bytes_max &&
                                               bytes <= options.shard_bytes_max - last.data_bytes);
    if (!options.one_file && !fits) conversion.files.emplace_back();
    OutputFile& file = conversion.files.back();
    std::ranges::move(tensors, std::back_inserter(file.tensors));
    file.data_bytes += bytes;
  }
}

// In a file the widest elements come first, so that each stands where its elements can be read in
// place; then names in order.
void place_tensors(OutputFile& file) {
  std::ranges::sort(file.tensors, [&](const OutputTensor& a, const OutputTensor& b) {
    const unsigned left_bits = bits(a.dtype);
    const unsigned right_bits = bits(b.dtype);
    return left_bits != right_bits ? left_bits > right_bits : a.name < b.name;
  });
  std::uint64_t at = 0;
  for (OutputTensor& tensor : file.tensors) {
    const std::uint64_t bytes = tensor.byte_count();
    tensor.begin = at;
    tensor.end = at += bytes;
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
  if (!options.quantize.formats.empty()) check_names(conversion);
  if (conversion.files.size() > 1) {
    conversion.index_name = options.stem + ".safetensors.index.json";
  }
  for (std::size_t f = 0; f < conversion.files.size(); ++f) {
    OutputFile& file = conversion.files[f];
    if (!options.one_file) file.name = file_name(options.stem, f, conversion.files.size());
    place_tensors(file);
    file.header_bytes = header_text(conversion, file).size();
    conversion.bytes_to_write += file.byte_count();
    if (file.header_bytes - 8 <= safetensors_header_bytes_max) continue;
    conversion.plan.findings.push_back(
        {.severity = Severity::error,
         .code = "st.header_too_large",
         .message =
             fmt::format("{} tensors do not fit the header of one file", file.tensors.size()),
         .suggestion = "write a folder with smaller shards",
         .found = fmt::format("{} bytes", file.header_bytes),
         .expected = fmt::format("at most {}", safetensors_header_bytes_max)});
  }
}

}  // namespace loadstone
