#include "convert/given_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <optional>
#include <vector>

#include "base/text.h"

namespace loadstone {

namespace {

template <typename Enum>
std::string text_of(const std::optional<Enum>& chosen) {
  return chosen ? std::string(name(*chosen)) : std::string();
}

std::string text_of(const std::vector<std::string>& items) {
  return fmt::format("{}", fmt::join(items, ", "));
}

std::string text_of(bool is_on) { return is_on ? "on" : ""; }

// Returns a text such as "down_proj=nf4, nvfp4".
std::string text_of(const std::vector<QuantizeFormat>& formats) {
  std::vector<std::string> texts;
  for (const auto& [pattern, made] : formats) {
    std::string& text = texts.emplace_back(pattern.empty() ? "" : pattern + "=");
    text += made.encoding;
    if (made.block_size != Quantization().block_size) text += fmt::format(":{}", made.block_size);
    if (!made.dialect.empty()) text += fmt::format(" ({})", made.dialect);
  }
  return text_of(texts);
}

void add_merge(const MergeOptions& merge, std::map<std::string, std::string>& texts) {
  std::vector<float> factors;
  for (const MergeAdapter& each : merge.adapters) factors.push_back(each.factor);
  texts["method"] = name(merge.method);
  texts["weights"] = fmt::format("{}", fmt::join(merge.weights, ", "));
  texts["lora"] = fmt::format("{}", fmt::join(factors, ", "));
  if (merge.density) texts["density"] = fmt::format("{}", *merge.density);
  if (merge.seed) texts["seed"] = fmt::format("{}", *merge.seed);
}

}  // namespace

std::map<std::string, std::string> given_options(const ConvertOptions& options) {
  const QuantizeOptions& quantize = options.quantize;
  std::map<std::string, std::string> texts = {
      {"dtype", text_of(options.dtype)},
      {"block-dtype", std::string(name(options.block_dtype))},
      {"dequantize", text_of(options.dequantize)},
      {"require-lossless", text_of(options.require_lossless)},
      {"experts", std::string(name(options.experts))},
      {"quantize", text_of(quantize.formats)},
      {"include", text_of(quantize.include)},
      {"exclude", text_of(quantize.exclude)},
      {"style", text_of(quantize.style)},
      {"imatrix", quantize.importance ? quantize.importance->path : std::string()},
      {"rules", options.rules.empty() ? std::string() : counted(options.rules.size(), "rule")},
      {"shard-size", exact_bytes(options.shard_bytes_max)},
      {"name", options.stem}};
  if (options.merge) add_merge(*options.merge, texts);
  std::erase_if(texts, [](const auto& each) { return each.second.empty(); });
  return texts;
}

}  // namespace loadstone
