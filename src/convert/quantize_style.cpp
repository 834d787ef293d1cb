#include <fmt/format.h>

#include <charconv>
#include <iterator>
#include <system_error>
#include <utility>

#include "base/named.h"
#include "base/only_errors.h"
#include "base/refuse_option.h"
#include "base/text.h"
#include "base/unknown_word.h"
#include "base/words.h"
#include "codec/encode.h"
#include "convert/container.h"
#include "convert/gguf_mix.h"
#include "convert/kept_blocks.h"
#include "convert/quantize_config.h"
#include "loadstone/error.h"

namespace loadstone {

std::string_view name(QuantizeStyle style) noexcept {
  switch (style) {
    case QuantizeStyle::unified:
      return "modelopt";
    case QuantizeStyle::compressed_tensors:
      return "compressed-tensors";
    case QuantizeStyle::gguf:
      return "gguf";
  }
  return {};
}

std::string_view module_of(std::string_view name) noexcept {
  constexpr std::string_view weight = ".weight";
  return name.ends_with(weight) ? name.substr(0, name.size() - weight.size()) : name;
}

NamingStyle naming_style(const WrittenEncoding& encoding, QuantizeStyle style) noexcept {
  if (encoding.is_bitsandbytes()) return NamingStyle::bnb;
  if (style == QuantizeStyle::gguf) return NamingStyle::gguf;
  return style == QuantizeStyle::unified ? NamingStyle::unified : NamingStyle::compressed;
}

const ComponentName& component_of(const WrittenEncoding& encoding, QuantizeStyle style,
                                  std::string_view component) {
  const ComponentName* const found =
      find_component(encoding, naming_style(encoding, style), component);
  if (found == nullptr) {
    throw Error("internal", "a part has no name in this style", {.found = std::string(component)});
  }
  return *found;
}

std::string component_name(const std::string& target, std::size_t part, std::string_view suffix) {
  if (target.ends_with(".weight")) return fmt::format("{}.{}", module_of(target), suffix);
  return part == 0 ? target : fmt::format("{}_{}", target, suffix);
}

std::string_view name(QuantizeMode mode) noexcept {
  constexpr std::string_view names[] = {"exact", "modelopt-compat"};
  const auto index = static_cast<std::size_t>(mode);
  return index < std::size(names) ? names[index] : std::string_view();
}

std::optional<QuantizeMode> quantize_mode(std::string_view text) noexcept {
  return from_name<QuantizeMode>(text);
}

static Quantization quantization_of(std::string_view text, QuantizeMode mode, FileFormat format) {
  Quantization quantization;
  const auto colon = text.find(':');
  quantization.encoding = lowered(text.substr(0, colon));
  const WrittenEncoding* const encoding = find_written_encoding(quantization.encoding);
  const bool is_format = container_of(format).is_format(quantization.encoding);
  if (encoding == nullptr && !is_format && quantization.encoding != "none") {
    std::vector<std::string> known = written_encoding_names();
    known.emplace_back("none");
    if (find_mix(quantization.encoding) != nullptr) {
      refuse_option("quantize", "a mix of types is for a TARGET that ends in .gguf",
                    printable(text), either(known));
    }
    if (format == FileFormat::gguf) {
      for (const Mix& mix : mixes()) known.emplace_back(mix.name);
    }
    refuse_option("quantize", unknown_word("encoding", quantization.encoding, known));
  }
  if (mode != QuantizeMode::exact && is_format) {
    refuse_option("mode", "GGUF files have no bytes of ModelOpt", printable(name(mode)), "exact");
  }
  if (colon != std::string_view::npos) {
    const std::string_view digits = text.substr(colon + 1);
    const auto [end, problem] =
        std::from_chars(digits.data(), digits.data() + digits.size(), quantization.block_size);
    const bool has_blocks = encoding != nullptr && encoding->takes_block_size;
    if (problem != std::errc() || end != digits.data() + digits.size() || !has_blocks) {
      refuse_option("quantize", "no block size that the encoding takes", printable(text), "nf4:64");
    }
  }
  if (mode == QuantizeMode::exact || encoding == nullptr) return quantization;
  if (encoding->is_bitsandbytes() || encoding->is_gguf()) {
    refuse_option("mode",
                  fmt::format("{} is {} and has no bytes of ModelOpt", quantization.encoding,
                              encoding->is_gguf() ? "GGUF's" : "bitsandbytes'"),
                  printable(name(mode)), "exact");
  }
  quantization.dialect = encoding->exported_dialect;
  return quantization;
}

Quantization quantization_from_user(std::string_view text, QuantizeMode mode, FileFormat format) {
  return only_errors([&] { return quantization_of(text, mode, format); });
}

void check_style(const QuantizeOptions& options) {
  const WrittenEncoding* first = nullptr;
  for (const QuantizeFormat& format : options.formats) {
    if (format.quantization.encoding == "none") continue;
    const WrittenEncoding* const blocks = find_written_encoding(format.quantization.encoding);
    if (blocks != nullptr && blocks->is_gguf()) {
      refuse_option("quantize",
                    "GGUF blocks are stored in GGUF files: name a TARGET that ends in .gguf",
                    printable(blocks->name), "NAME.gguf");
    }
    QuantizeForm form;
    if (auto problem = prepare_quantization(format.quantization, {256, 256}, Dtype::bf16, form)) {
      refuse_option(
          "quantize", std::move(problem->message),
          printable(problem->found.empty() ? format.quantization.encoding : problem->found),
          std::move(problem->expected));
    }
    const WrittenEncoding& encoding = written_encoding(format.quantization);
    if (format.quantization.nested) {
      refuse_option("quantize", "nested scales are not written to files", printable(encoding.name));
    }
    const QuantizeStyle style = options.style.value_or(QuantizeStyle::unified);
    if (options.style && encoding.is_bitsandbytes()) {
      refuse_option("quantize",
                    fmt::format("{} has no style {}, only that of bitsandbytes: name no style",
                                encoding.name, name(style)),
                    printable(name(style)), fmt::format("no style for {}", encoding.name));
    }
    const auto holds = [&](QuantizeStyle known) {
      return !encoding.names(naming_style(encoding, known)).empty();
    };
    if (!holds(style)) {
      refuse_option("quantize",
                    fmt::format("files of the style {} do not hold {}", name(style), encoding.name),
                    printable(encoding.name), "style " + either(names_of<QuantizeStyle>(holds)));
    }
    if (first == nullptr) first = &encoding;
    if (first != &encoding && (encoding.is_bitsandbytes() || first->is_bitsandbytes())) {
      refuse_option("quantize", "a config of bitsandbytes knows one encoding",
                    printable(encoding.name), std::string(first->name));
    }
  }
}

std::vector<OutputTensor> output_tensors(const Conversion& conversion, const PlannedTarget& target,
                                         QuantizeStyle style) {
  std::vector<OutputTensor> tensors;
  if (!target.quantization) {
    PlainForm form = plain_form(conversion, target);
    tensors.push_back({.name = target.name,
                       .shape = std::move(form.shape),
                       .encoding = form.encoding,
                       .constant = target.recipe.constant});
    return tensors;
  }
  const Quantization& quantization = *target.quantization;
  const auto parts = quantized_parts(quantization, target.shape, target.dtype);
  const WrittenEncoding& encoding = written_encoding(quantization);
  if (encoding.is_gguf()) {
    QuantizeForm form;
    static_cast<void>(prepare_quantization(quantization, target.shape, target.dtype, form));
    tensors.push_back(
        {.part = 0, .name = target.name, .shape = target.shape, .encoding = form.block});
    return tensors;
  }
  for (std::uint32_t i = 0; i < parts.size(); ++i) {
    const ComponentName& named = component_of(encoding, style, parts[i].name);
    tensors.push_back({.part = i,
                       .name = component_name(target.name, i, named.suffix),
                       .shape = shape_in_file(named.form, parts[i].shape),
                       .encoding = parts[i].dtype,
                       .is_inverted = named.is_inverted});
  }
  if (encoding.constants == nullptr) return tensors;
  for (auto& constant : encoding.constants(quantization, target.shape, target.dtype)) {
    tensors.push_back({.name = fmt::format("{}.{}", module_of(target.name), constant.suffix),
                       .shape = std::move(constant.shape),
                       .encoding = constant.dtype,
                       .constant = std::move(constant.bytes)});
  }
  return tensors;
}

}  // namespace loadstone
