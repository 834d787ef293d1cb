#include "convert/header.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <variant>

#include "base/ceil_div.h"
#include "base/json_writer.h"
#include "base/text.h"

namespace loadstone {

namespace {

// A vocabulary's worth of text is no description of a file.
constexpr std::size_t text_bytes_max = 64 << 10;
constexpr std::size_t header_alignment = 8;

struct ToText {
  MetadataType type;

  std::optional<std::string> operator()(const std::string& text) const {
    if (text.size() > text_bytes_max || !is_utf8(text)) return std::nullopt;
    return text;
  }
  std::optional<std::string> operator()(bool truth) const { return truth ? "true" : "false"; }
  std::optional<std::string> operator()(std::int64_t number) const {
    return fmt::format("{}", number);
  }
  std::optional<std::string> operator()(std::uint64_t number) const {
    return fmt::format("{}", number);
  }
  // The shortest text that is the same number again, in the width that the file has.
  std::optional<std::string> operator()(double number) const {
    return type == MetadataType::f32 ? fmt::format("{}", static_cast<float>(number))
                                     : fmt::format("{}", number);
  }
  std::optional<std::string> operator()(const MetadataArray&) const { return std::nullopt; }
};

}  // namespace

std::vector<std::pair<std::string, std::string>> header_metadata(const Catalog& catalog,
                                                                 std::vector<Finding>& findings) {
  std::vector<std::pair<std::string, std::string>> metadata;
  std::vector<std::string> left_out;
  bool has_format = false;
  for (const auto& [key, item] : catalog.metadata()) {
    auto text = is_utf8(key) ? std::visit(ToText{item.type}, item.value) : std::nullopt;
    if (!text) {
      left_out.push_back(key);
      continue;
    }
    has_format = has_format || key == "format";
    metadata.emplace_back(key, *std::move(text));
  }
  if (!has_format) {
    metadata.emplace_back("format", "pt");
    std::ranges::sort(metadata);
  }
  if (!left_out.empty()) {
    findings.push_back({.severity = Severity::info,
                        .code = "convert.metadata",
                        .sources = left_out,
                        .message = fmt::format("{} values of metadata are no short text and are "
                                               "left out: '{}'{}",
                                               left_out.size(), printable(left_out.front()),
                                               left_out.size() > 1 ? " ..." : "")});
  }
  return metadata;
}

std::string header_text(const Conversion& conversion, const OutputFile& file) {
  JsonWriter json;
  json.begin_object();
  json.key("__metadata__");
  json.begin_object();
  for (const auto& [key, text] : conversion.metadata) json.member(key, text);
  json.end_object();
  for (const OutputTensor& tensor : file.tensors) {
    json.key(tensor.name);
    json.begin_object();
    json.member("dtype", name(tensor.dtype));
    json.member("shape", tensor.shape.extents());
    json.member("data_offsets", std::vector<std::uint64_t>{tensor.begin, tensor.end});
    json.end_object();
  }
  json.end_object();
  std::string text = json.take();
  text.resize(round_up(text.size(), header_alignment), ' ');
  std::string length(8, '\0');
  for (std::size_t i = 0; i < length.size(); ++i) {
    length[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
  }
  return length + text;
}

std::string index_text(const Conversion& conversion) {
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

}  // namespace loadstone
