// Writes safetensors files: length, JSON and padding before the data, and an index next to shards.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/json_writer.h"
#include "base/text.h"
#include "catalog/expert_series.h"
#include "convert/choose/quantize_config.h"
#include "convert/write/container.h"
#include "formats/gguf.h"
#include "formats/gguf_shapes.h"
#include "formats/metadata.h"
#include "formats/safetensors.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

// Larger texts, such as vocabularies, do not describe a file, so they are not copied.
constexpr std::size_t metadata_text_bytes_max = 64 << 10;

class SafetensorsContainer final : public Container {
 public:
  [[nodiscard]] FileFormat format() const noexcept override { return FileFormat::safetensors; }
  [[nodiscard]] std::string_view suffix() const noexcept override { return ".safetensors"; }
  [[nodiscard]] std::string_view index_suffix() const noexcept override {
    return ".safetensors.index.json";
  }
  [[nodiscard]] bool holds_blocks() const noexcept override { return false; }

  // Converts text, numbers and bools to text. "format" defaults to "pt", because libraries require
  // it.
  [[nodiscard]] Metadata metadata(const Catalog& catalog, const ConvertOptions& options,
                                  std::vector<Finding>& findings) const override {
    const Metadata& given = options.metadata;
    Metadata metadata;
    std::vector<std::string> left_out;
    const auto add = [&](const std::string& key, const MetadataValue& item) {
      auto text = is_utf8(key) ? text_of(item) : std::nullopt;
      if (!text || text->size() > metadata_text_bytes_max || !is_utf8(*text)) return false;
      metadata.insert_or_assign(key, MetadataValue{.value = *std::move(text)});
      return true;
    };
    for (const auto& [key, item] : catalog.metadata()) {
      // Skip original shapes, which the tensors have again, and keys about the source's files.
      if (key.starts_with(gguf_shape_prefix) || is_gguf_file_key(key)) continue;
      if (!given.contains(key) && !add(key, item)) left_out.push_back(key);
    }
    const std::string types = types_text(catalog.metadata(), metadata);
    if (!types.empty() && !add(types_key, {.value = types})) left_out.emplace_back(types_key);
    for (const auto& [key, item] : given) {
      if (add(key, item)) continue;
      throw Error("plan.options",
                  "safetensors metadata can contain only short strings, not arrays or long strings",
                  {.tensor = printable(key), .field = "metadata", .found = type_name(item)});
    }
    metadata.try_emplace("format", MetadataValue{.value = "pt"});
    report_left_out(left_out, "safetensors metadata can contain only short strings", findings);
    return metadata;
  }

  [[nodiscard]] std::optional<Finding> refuse(const OutputTensor& tensor,
                                              const ConvertOptions&) const override {
    if (!is_safetensors_name(tensor.name)) {
      return Finding{.severity = Severity::error,
                     .code = "convert.name",
                     .target = tensor.name,
                     .message = fmt::format("a safetensors file cannot have a tensor named '{}'",
                                            printable(tensor.name)),
                     .suggestion = "rename it with a rule"};
    }
    if (tensor.encoding.is_dtype() && is_in_safetensors(tensor.encoding.dtype())) return {};
    return Finding{.severity = Severity::error,
                   .code = "plan.dtype",
                   .target = tensor.name,
                   .message = fmt::format("'{}' is {}, which safetensors does not support",
                                          printable(tensor.name), tensor.encoding.name()),
                   .found = std::string(tensor.encoding.name())};
  }

  [[nodiscard]] Choices choose(const ConvertOptions& options, const Catalog& catalog, Metadata&,
                               Recipes& recipes, std::vector<Finding>& findings) const override {
    check_style(options.quantize);
    return choose_quantized(options, cut_experts_max(catalog), recipes, findings);
  }
  [[nodiscard]] QuantizeStyle style(const ConvertOptions& options) const noexcept override {
    return options.quantize.style.value_or(QuantizeStyle::unified);
  }

  void place(const Conversion&, OutputFile& file) const override {
    std::ranges::sort(file.tensors, [](const OutputTensor& a, const OutputTensor& b) {
      return comes_first(a.encoding.dtype(), a.name, b.encoding.dtype(), b.name);
    });
    std::uint64_t at = 0;
    for (OutputTensor& tensor : file.tensors) {
      const std::uint64_t bytes = tensor.byte_count();
      tensor.begin = at;
      tensor.end = at += bytes;
    }
    file.data_bytes = at;
  }

  [[nodiscard]] std::string header(const Conversion& conversion, std::size_t file) const override {
    std::map<std::string, std::string> metadata;
    for (const auto& [key, item] : conversion.metadata) {
      metadata.emplace(key, std::get<std::string>(item.value));
    }
    std::vector<SafetensorsEntry> entries;
    for (const OutputTensor& tensor : conversion.files[file].tensors) {
      entries.push_back(
          {tensor.name, tensor.encoding.dtype(), &tensor.shape, tensor.begin, tensor.end});
    }
    return safetensors_header(metadata, entries);
  }

  [[nodiscard]] std::optional<Finding> refuse_header(const OutputFile& file) const override {
    if (file.header_bytes - 8 <= safetensors_header_bytes_max) return std::nullopt;
    return Finding{.severity = Severity::error,
                   .code = "st.header_too_large",
                   .message = fmt::format("{} tensors do not fit in the header of one file",
                                          file.tensors.size()),
                   .suggestion = "write a folder with smaller shards",
                   .found = counted(file.header_bytes, "byte"),
                   .expected = fmt::format("at most {}", safetensors_header_bytes_max)};
  }

  // model.safetensors.index.json
  [[nodiscard]] std::string index(const Conversion& conversion) const override {
    std::uint64_t total = 0;
    std::vector<std::pair<std::string_view, std::string_view>> files;
    for (const OutputFile& file : conversion.files) {
      total += file.data_bytes;
      for (const OutputTensor& tensor : file.tensors) {
        files.emplace_back(tensor.name, file.name);
      }
    }
    std::ranges::sort(files);
    JsonWriter json(2);
    json.begin_object();
    json.key("metadata");
    json.begin_object();
    json.member("total_size", total);
    json.end_object();
    json.key("weight_map");
    json.begin_object();
    for (const auto& [tensor, file] : files) json.member(tensor, file);
    json.end_object();
    json.end_object();
    return json.take() + "\n";
  }
};

constexpr SafetensorsContainer the_safetensors_container;

}  // namespace

const Container& safetensors_container = the_safetensors_container;

}  // namespace loadstone
