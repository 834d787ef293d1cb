#include "convert/quantize_style.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <system_error>
#include <utility>

#include "base/text.h"
#include "kernels/bnb.h"
#include "kernels/quantize.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

enum class Form : std::uint8_t {
  same,      // as the kernel gives it
  flat,      // [rows] in place of [rows, 1]
  column,    // [rows, 1] in place of [rows]
  one,       // [1] in place of []
  blocks_4d  // [a, 1, b, 1] in place of [a, b]: ModelOpt's blocks in two dims
};

// What a part is called after the module's name, and how it stands there.
struct PartStyle {
  std::string_view encoding;
  std::string_view part;
  std::string_view suffix;
  Form form = Form::same;
  bool is_inverted = false;
};

constexpr PartStyle unified[] = {
    {"fp8", "data", "weight"},
    {"fp8", "scale", "weight_scale"},
    {"fp8-channel", "data", "weight"},
    {"fp8-channel", "scale", "weight_scale"},
    {"fp8-block", "data", "weight"},
    {"fp8-block", "scale", "weight_scale", Form::blocks_4d},
    {"int8-channel", "data", "weight"},
    {"int8-channel", "scale", "weight_scale", Form::flat},
    {"int4", "data", "weight"},
    {"int4", "scale", "weight_scale"},
    {"int4-awq", "data", "weight"},
    {"int4-awq", "scale", "weight_scale"},
    {"nvfp4", "data", "weight"},
    {"nvfp4", "scale", "weight_scale"},
    {"nvfp4", "scale_2", "weight_scale_2"},
    {"mxfp4", "data", "weight"},
    {"mxfp4", "scale", "weight_scale"},
    {"mxfp8", "data", "weight"},
    {"mxfp8", "scale", "weight_scale"},
};

constexpr PartStyle compressed_tensors[] = {
    {"fp8", "data", "weight"},
    {"fp8", "scale", "weight_scale", Form::one},
    {"fp8-channel", "data", "weight"},
    {"fp8-channel", "scale", "weight_scale", Form::column},
    {"fp8-block", "data", "weight"},
    {"fp8-block", "scale", "weight_scale"},
    {"int8-channel", "data", "weight"},
    {"int8-channel", "scale", "weight_scale"},
    {"nvfp4", "data", "weight_packed"},
    {"nvfp4", "scale", "weight_scale"},
    {"nvfp4", "scale_2", "weight_global_scale", Form::one, true},
    {"mxfp4", "data", "weight_packed"},
    {"mxfp4", "scale", "weight_scale"},
    {"mxfp8", "data", "weight"},
    {"mxfp8", "scale", "weight_scale"},
};

constexpr PartStyle of_bitsandbytes[] = {
    {"nf4", "data", "weight"},  {"nf4", "absmax", "weight.absmax"},
    {"fp4", "data", "weight"},  {"fp4", "absmax", "weight.absmax"},
    {"int8", "data", "weight"}, {"int8", "absmax", "SCB"},
};

std::span<const PartStyle> styles_of(std::string_view encoding, QuantizeStyle style) {
  if (is_bitsandbytes(encoding)) return of_bitsandbytes;
  if (style == QuantizeStyle::unified) return unified;
  return compressed_tensors;
}

const PartStyle* style_of(std::string_view encoding, std::string_view part, QuantizeStyle style) {
  for (const PartStyle& each : styles_of(encoding, style)) {
    if (each.encoding == encoding && each.part == part) return &each;
  }
  return nullptr;
}

std::vector<std::string_view> styles_with(std::string_view encoding) {
  std::vector<std::string_view> styles;
  for (const QuantizeStyle style : {QuantizeStyle::unified, QuantizeStyle::compressed_tensors}) {
    if (style_of(encoding, "data", style) != nullptr) styles.push_back(name(style));
  }
  return styles;
}

Shape shape_as(Form form, const Shape& shape) {
  std::vector<std::uint64_t> extents = shape.extents();
  switch (form) {
    case Form::same:
      break;
    case Form::flat:
      if (extents.size() > 1 && extents.back() == 1) extents.pop_back();
      break;
    case Form::column:
      if (extents.size() == 1) extents.push_back(1);
      break;
    case Form::one:
      if (extents.empty()) extents.push_back(1);
      break;
    case Form::blocks_4d:
      if (extents.size() == 2) extents = {extents[0], 1, extents[1], 1};
      break;
  }
  return Shape(std::move(extents));
}

Constant constant_of(const void* bytes, std::size_t size) {
  const auto* const begin = static_cast<const std::byte*>(bytes);
  return std::make_shared<const std::vector<std::byte>>(begin, begin + size);
}

OutputTensor constant_tensor(std::string name, Shape shape, Dtype dtype, Constant constant) {
  OutputTensor tensor;
  tensor.name = std::move(name);
  tensor.shape = std::move(shape);
  tensor.dtype = dtype;
  tensor.constant = std::move(constant);
  return tensor;
}

// What bitsandbytes keeps beside packed numbers: the codes' values, and the rest as JSON in bytes.
void add_state(const PlannedTarget& target, const Quantization& quantization,
               const std::string& prefix, std::vector<OutputTensor>& tensors) {
  static const std::array<Constant, 2> maps = {
      constant_of(bnb4_values(Bnb4Code::nf4).data(), 16 * sizeof(float)),
      constant_of(bnb4_values(Bnb4Code::fp4).data(), 16 * sizeof(float))};
  tensors.push_back(constant_tensor(prefix + "weight.quant_map", {16}, Dtype::f32,
                                    maps[quantization.encoding == "nf4" ? 0 : 1]));
  std::string shape;
  for (const std::uint64_t extent : target.shape.extents()) {
    shape += fmt::format("{}{}", shape.empty() ? "" : ", ", extent);
  }
  const std::string_view dtype = target.dtype == Dtype::bf16  ? "bfloat16"
                                 : target.dtype == Dtype::f16 ? "float16"
                                                              : "float32";
  const std::string state =
      fmt::format(R"({{"quant_type": "{}", "blocksize": {}, "dtype": "{}", "shape": [{}]}})",
                  quantization.encoding, quantization.block_size, dtype, shape);
  tensors.push_back(
      constant_tensor(prefix + "weight.quant_state.bitsandbytes__" + quantization.encoding,
                      {state.size()}, Dtype::u8, constant_of(state.data(), state.size())));
}

}  // namespace

std::string_view name(QuantizeStyle style) noexcept {
  return style == QuantizeStyle::unified ? "modelopt" : "compressed-tensors";
}

bool is_bitsandbytes(std::string_view encoding) noexcept {
  return encoding == "nf4" || encoding == "fp4" || encoding == "int8";
}

std::string_view module_of(std::string_view name) noexcept {
  constexpr std::string_view weight = ".weight";
  return name.ends_with(weight) ? name.substr(0, name.size() - weight.size()) : name;
}

namespace {

// What stands in files is what ModelOpt exports, which is not always what it computes with. With
// scales by rows or blocks that is one rounding, as in "exact".
std::string_view exported_dialect(std::string_view encoding) noexcept {
  if (encoding == "fp8") return "modelopt-export";
  constexpr std::string_view own[] = {"nvfp4", "mxfp4", "mxfp8", "int4", "int4-awq"};
  return std::ranges::find(own, encoding) != std::end(own) ? "modelopt-compat" : "";
}

}  // namespace

Quantization quantization_from_user(std::string_view text, std::string_view mode) {
  constexpr std::string_view known[] = {
      "nf4",         "fp4",      "int8",  "int8-channel", "fp8",   "fp8-block", "int4",
      "fp8-channel", "int4-awq", "nvfp4", "mxfp4",        "mxfp8", "none"};
  const auto refuse = [](const char* field, std::string message, std::string_view found,
                         std::string expected = {}) {
    Where where;
    where.field = field;
    where.found = printable(found);
    where.expected = std::move(expected);
    throw Error("plan.options", std::move(message), std::move(where));
  };
  Quantization quantization;
  const auto colon = text.find(':');
  for (const char character : text.substr(0, colon)) {
    quantization.encoding +=
        static_cast<char>(character >= 'A' && character <= 'Z' ? character - 'A' + 'a' : character);
  }
  if (std::ranges::find(known, quantization.encoding) == std::end(known)) {
    refuse("quantize", "no such encoding", text,
           "fp8, fp8-channel, fp8-block, int8-channel, int4, int4-awq, nvfp4, mxfp4, mxfp8, nf4, "
           "fp4 or int8");
  }
  if (colon != std::string_view::npos) {
    const std::string_view digits = text.substr(colon + 1);
    const auto [end, problem] =
        std::from_chars(digits.data(), digits.data() + digits.size(), quantization.block_size);
    const bool has_blocks = quantization.encoding == "nf4" || quantization.encoding == "fp4";
    if (problem != std::errc() || end != digits.data() + digits.size() || !has_blocks) {
      refuse("quantize", "no block size of nf4 or fp4", text, "nf4:64");
    }
  }
  if (mode != "exact" && mode != "modelopt-compat") {
    refuse("mode", "no such mode", mode, "exact or modelopt-compat");
  }
  if (mode == "modelopt-compat" && is_bitsandbytes(quantization.encoding)) {
    refuse("mode", quantization.encoding + " is bitsandbytes' and has no bytes of ModelOpt", mode,
           "exact");
  }
  if (mode == "modelopt-compat") quantization.dialect = exported_dialect(quantization.encoding);
  return quantization;
}

void check_style(const QuantizeOptions& options) {
  const auto refuse = [](std::string message, const std::string& found, std::string expected = {}) {
    Where where;
    where.field = "quantize";
    where.found = printable(found);
    where.expected = std::move(expected);
    throw Error("plan.options", std::move(message), std::move(where));
  };
  std::string_view first;
  for (const QuantizeFormat& format : options.formats) {
    const std::string& encoding = format.quantization.encoding;
    if (encoding == "none") continue;
    QuantizeForm form;
    if (auto problem = prepare_quantization(format.quantization, {256, 256}, Dtype::bf16, form)) {
      refuse(std::move(problem->message), problem->found.empty() ? encoding : problem->found,
             std::move(problem->expected));
    }
    if (format.quantization.nested) {
      refuse("nested scales are not written to files", encoding);
    }
    const QuantizeStyle style = options.style.value_or(QuantizeStyle::unified);
    if (options.style && is_bitsandbytes(encoding)) {
      refuse(fmt::format("{} has no style {}, only that of bitsandbytes: name no style", encoding,
                         name(style)),
             std::string(name(style)), "no style for " + encoding);
    }
    if (style_of(encoding, "data", style) == nullptr) {
      refuse(fmt::format("files of the style {} do not hold {}", name(style), encoding), encoding,
             fmt::format("style {}", fmt::join(styles_with(encoding), " or ")));
    }
    const bool is_first = first.empty();
    if (is_first) first = encoding;
    if (!is_first && encoding != first && (is_bitsandbytes(encoding) || is_bitsandbytes(first))) {
      refuse("a config of bitsandbytes knows one encoding", encoding, std::string(first));
    }
  }
}

std::vector<OutputTensor> output_tensors(const PlannedTarget& target, QuantizeStyle style) {
  std::vector<OutputTensor> tensors;
  if (!target.quantization) {
    OutputTensor& tensor = tensors.emplace_back();
    tensor.name = target.name;
    tensor.shape = target.shape;
    tensor.dtype = target.dtype;
    tensor.constant = target.recipe.constant;
    return tensors;
  }
  const Quantization& quantization = *target.quantization;
  const bool is_weight = target.name.ends_with(".weight");
  const std::string_view module = module_of(target.name);
  const auto parts = quantized_parts(quantization, target.shape, target.dtype);
  for (std::uint32_t i = 0; i < parts.size(); ++i) {
    const PartStyle* const found = style_of(quantization.encoding, parts[i].name, style);
    if (found == nullptr) {
      throw Error("internal", "a part has no name in this style",
                  {.tensor = target.name, .found = parts[i].name});
    }
    OutputTensor& tensor = tensors.emplace_back();
    tensor.part = i;
    // A parameter that is no ".weight" gives its name to the parts.
    tensor.name = is_weight ? fmt::format("{}.{}", module, found->suffix)
                  : i == 0  ? target.name
                            : fmt::format("{}_{}", target.name, found->suffix);
    tensor.shape = shape_as(found->form, parts[i].shape);
    tensor.dtype = parts[i].dtype;
    tensor.is_inverted = found->is_inverted;
  }
  const std::string prefix = std::string(module) + ".";
  if (quantization.encoding == "nf4" || quantization.encoding == "fp4") {
    add_state(target, quantization, prefix, tensors);
  } else if (quantization.encoding == "int8") {
    static const Constant rows = constant_of("\0", 1);  // how the bytes lie: row by row
    tensors.push_back(constant_tensor(prefix + "weight_format", Shape(), Dtype::u8, rows));
  }
  return tensors;
}

}  // namespace loadstone
