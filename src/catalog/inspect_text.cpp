// Writes a catalog as JSON and as a table.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "base/finding_json.h"
#include "base/only_errors.h"
#include "base/text.h"
#include "formats/metadata.h"
#include "loadstone/catalog.h"
#include "loadstone/quantized_tensors.h"
#include "tensor/tensor_json.h"

namespace loadstone {

namespace {

std::string short_text(const MetadataValue& item) {
  constexpr std::size_t length_max = 60;
  if (const auto* text = std::get_if<std::string>(&item.value)) return printable(*text, length_max);
  if (const auto* array = std::get_if<MetadataArray>(&item.value)) {
    return fmt::format("{}, {}", counted(array->size(), "item"), type_name(item));
  }
  return json_of(item);
}

struct Total {
  std::size_t tensors = 0;
  std::uint64_t elements = 0;
  std::uint64_t bytes = 0;
};

std::map<std::string_view, Total> encoding_totals(const Catalog& catalog) {
  std::map<std::string_view, Total> totals;
  for (const TensorInfo& tensor : catalog.tensors()) {
    Total& total = totals[tensor.encoding.name()];
    ++total.tensors;
    // The sum does not overflow, because each element takes at least one bit of a file.
    total.elements += tensor.shape.numel().value_or(0);
    total.bytes += tensor.byte_count();
  }
  return totals;
}

std::string shard_lines(const Catalog& catalog) {
  std::vector<Total> totals(catalog.shards().size());
  for (const TensorInfo& tensor : catalog.tensors()) {
    ++totals[tensor.shard].tensors;
    totals[tensor.shard].bytes += tensor.byte_count();
  }
  std::string text;
  for (std::size_t i = 0; i < totals.size(); ++i) {
    const Shard& shard = catalog.shards()[i];
    text += fmt::format("  {:<48} {:<11} {:>15} {:>10}\n", printable(shard.relative_path, 120),
                        name(shard.format), counted(totals[i].tensors, "tensor"),
                        human_bytes(totals[i].bytes));
  }
  return text;
}

std::string quantized_lines(const Catalog& catalog) {
  std::map<std::string_view, std::size_t> counts;
  for (const QuantizedTensor& each : catalog.quantized().tensors()) {
    ++counts[each.is_readable() ? std::string_view(each.encoding) : "unreadable"];
  }
  std::string text = counts.empty() ? "" : "quantized\n";
  for (const auto& [encoding, count] : counts) {
    text += fmt::format("  {:<12} {:>15}\n", encoding, counted(count, "tensor"));
  }
  return text;
}

std::string encoding_lines(const Catalog& catalog) {
  std::string text;
  for (const auto& [encoding, total] : encoding_totals(catalog)) {
    text +=
        fmt::format("  {:<12} {:>15} {:>10} {:>25}\n", encoding, counted(total.tensors, "tensor"),
                    human_bytes(total.bytes), counted(total.elements, "element"));
  }
  return text;
}

}  // namespace

static void visit_fields(JsonWriter& json, const TensorInfo& tensor, const Catalog& catalog) {
  json.member("dtype", tensor.encoding);
  json.member("shape", tensor.shape);
  json.member("shard", catalog.shards()[tensor.shard].relative_path);
  json.member("offsets", std::pair(tensor.offset_begin, tensor.offset_end));
  json.member("bytes", tensor.byte_count());
  json.optional("strides", tensor.strides);
}

static void visit_fields(JsonWriter& json, const QuantizedTensor& quantized,
                         const Catalog& catalog) {
  json.member("name", quantized.name);
  json.member("encoding", quantized.is_readable() ? &quantized.encoding : nullptr);
  if (quantized.is_readable()) json.member("shape", quantized.shape());
  json.key("components");
  json.begin_object();
  const auto add = [&](std::uint32_t tensor) {
    const std::string& name = catalog.tensors()[tensor].name;
    json.member(quantized.role(tensor, name), name);
  };
  if (quantized.data != QuantizedTensor::none) add(quantized.data);
  const std::vector<std::uint32_t> companions = quantized.companions();
  for (const std::uint32_t companion : companions) add(companion);
  for (const std::uint32_t source : quantized.decoding.sources) {
    const bool is_listed =
        source == quantized.data || std::ranges::find(companions, source) != companions.end();
    if (!is_listed) add(source);
  }
  json.end_object();
}

// Writes a tensor of blocks, which has no scale component, because the blocks contain their scales.
static void write_blocks(JsonWriter& json, const TensorInfo& tensor) {
  json.begin_object();
  json.member("name", tensor.name);
  json.member("encoding", tensor.encoding);
  json.member("shape", tensor.shape);
  json.member("components", std::map<std::string_view, std::string_view>{{"data", tensor.name}});
  json.end_object();
}

static void visit_fields(JsonWriter& json, const Total& total) {
  json.member("tensors", total.tensors);
  json.member("elements", total.elements);
  json.member("bytes", total.bytes);
}

static void visit_fields(JsonWriter& json, const Shard& shard) {
  json.member("path", shard.relative_path);
  json.member("format", shard.format);
  json.member("bytes", shard.identity.bytes);
  json.member("data_begin", shard.data_begin);
  json.member("header_digest", shard.header_digest);
}

static void visit_fields(JsonWriter& json, const Catalog& catalog) {
  json.key("tensors");
  json.begin_object();
  for (const TensorInfo& tensor : catalog.tensors()) json.member(tensor.name, tensor, catalog);
  json.end_object();
  json.member("metadata", catalog.metadata());
  json.member("total_bytes", catalog.total_bytes());
  json.member("encodings", encoding_totals(catalog));
  json.key("metadata_types");
  json.begin_object();
  for (const auto& [key, item] : catalog.metadata()) json.member(key, type_name(item));
  json.end_object();
  json.key("quantized");
  json.begin_array();
  for (const auto& quantized : catalog.quantized().tensors()) json.value(quantized, catalog);
  for (const TensorInfo& tensor : catalog.tensors()) {
    if (!tensor.encoding.is_dtype()) write_blocks(json, tensor);
  }
  json.end_array();
  json.member("findings", all_findings(catalog));
  json.member("root", catalog.root());
  json.member("shards", catalog.shards());
}

std::string to_json(const Catalog& catalog) {
  return only_errors([&] { return json_text(catalog, 2); });
}

static std::string table_of(const Catalog& catalog, bool with_tensors) {
  std::string text =
      fmt::format("{}: {}, {}\n", printable(catalog.shown_path(), 400),
                  counted(catalog.tensors().size(), "tensor"), human_bytes(catalog.total_bytes()));
  text += "shards\n" + shard_lines(catalog) + "encodings\n" + encoding_lines(catalog) +
          quantized_lines(catalog);
  if (!catalog.metadata().empty()) text += "metadata\n";
  for (const auto& [key, item] : catalog.metadata()) {
    text +=
        fmt::format("  {:<40} {:<8} {}\n", printable(key, 100), name(item.type), short_text(item));
  }
  if (with_tensors) text += "tensors\n";
  for (const TensorInfo& tensor : catalog.tensors()) {
    if (!with_tensors) break;
    text += fmt::format("  {:<56} {:<8} {:<24} {:>10}\n", printable(tensor.name),
                        tensor.encoding.name(), printable(tensor.shape.text(), 80),
                        human_bytes(tensor.byte_count()));
  }
  const std::vector<Finding> findings = all_findings(catalog);
  if (!findings.empty()) text += "findings\n";
  return text + finding_lines(findings);
}

std::string to_table(const Catalog& catalog, bool with_tensors) {
  return only_errors([&] { return table_of(catalog, with_tensors); });
}

}  // namespace loadstone
