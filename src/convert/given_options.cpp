#include "convert/given_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <span>

#include "base/digest.h"
#include "base/text.h"
#include "formats/metadata.h"

namespace loadstone {

namespace {

std::string digest_text(const std::string& text) {
  Digest digest;
  digest.update(std::as_bytes(std::span(text)));
  return digest.hex().substr(0, 8);
}

// Returns a text such as "down_proj=nf4, nvfp4".
std::string formats_text(const std::vector<QuantizeFormat>& formats) {
  std::vector<std::string> texts;
  for (const QuantizeFormat& each : formats) {
    const Quantization& made = each.quantization;
    std::string& text = texts.emplace_back();
    if (!each.pattern.empty()) text = each.pattern + "=";
    text += made.encoding;
    if (made.block_size != Quantization().block_size) text += fmt::format(":{}", made.block_size);
    if (!made.dialect.empty()) text += fmt::format(" ({})", made.dialect);
  }
  return fmt::format("{}", fmt::join(texts, ", "));
}

class Texts {
 public:
  // Adds an option that differs from its default.
  void add(const char* name, bool is_given, std::string text) {
    if (is_given) texts.emplace(name, std::move(text));
  }
  void add(const char* name, bool is_given) { add(name, is_given, "on"); }
  void add(const char* name, const std::vector<std::string>& items) {
    add(name, !items.empty(), fmt::format("{}", fmt::join(items, ", ")));
  }

  std::map<std::string, std::string> texts{};
};

void add_merge(const MergeOptions& merge, Texts& texts) {
  std::vector<float> factors;
  std::vector<std::string> ignored;
  for (const MergeAdapter& each : merge.adapters) {
    factors.push_back(each.factor);
    ignored.insert(ignored.end(), each.ignore.begin(), each.ignore.end());
  }
  const bool is_sum = merge.method == MergeMethod::linear;
  texts.add("method", !is_sum, std::string(name(merge.method)));
  texts.add("weights", merge.weights != std::vector{1.0F},
            fmt::format("{}", fmt::join(merge.weights, ", ")));
  texts.add("lora", !factors.empty(), fmt::format("{}", fmt::join(factors, ", ")));
  texts.add("lora-ignore", ignored);
  texts.add("tie", merge.tie != TiePolicy::split, std::string(name(merge.tie)));
  texts.add("normalise", merge.normalise.value_or(false));
  texts.add("scale", merge.scale.has_value(), fmt::format("{}", merge.scale.value_or(0)));
  texts.add("density", merge.density.has_value(), fmt::format("{}", merge.density.value_or(0)));
  texts.add("seed", merge.seed.has_value(), fmt::format("{}", merge.seed.value_or(0)));
}

}  // namespace

std::map<std::string, std::string> given_options(const ConvertOptions& options) {
  Texts texts;
  const QuantizeOptions& quantize = options.quantize;
  texts.add("dtype", options.dtype.has_value(),
            std::string(name(options.dtype.value_or(Dtype::f32))));
  texts.add("block-dtype", options.block_dtype != Dtype::bf16,
            std::string(name(options.block_dtype)));
  texts.add("dequantize", options.dequantize);
  texts.add("experts", options.experts != ExpertLayout::keep, std::string(name(options.experts)));
  texts.add("quantize", !quantize.formats.empty(), formats_text(quantize.formats));
  texts.add("include", quantize.include);
  texts.add("exclude", quantize.exclude);
  texts.add("style", quantize.style.has_value(),
            std::string(name(quantize.style.value_or(QuantizeStyle::unified))));
  texts.add("imatrix", quantize.importance != nullptr,
            quantize.importance ? quantize.importance->path : std::string());
  texts.add("allow-non-finite", quantize.allow_non_finite);
  texts.add("rules", !options.rules.empty(),
            fmt::format("{} (digest {})", counted(options.rules.size(), "rule"),
                        digest_text(rules_to_json(options.rules))));
  texts.add("recipes", !options.recipes.targets.empty(),
            counted(options.recipes.targets.size(), "recipe"));
  std::string metadata;
  for (const auto& [key, item] : options.metadata) metadata += key + "=" + json_of(item) + " ";
  texts.add("metadata", !metadata.empty(), metadata);
  texts.add("beyond-ggml", options.beyond_ggml);
  texts.add("shard-size", options.shard_bytes_max != defaults::shard_bytes_max,
            exact_bytes(options.shard_bytes_max));
  texts.add("name", !options.stem.empty(), options.stem);
  if (options.merge) add_merge(*options.merge, texts);
  return std::move(texts.texts);
}

}  // namespace loadstone
