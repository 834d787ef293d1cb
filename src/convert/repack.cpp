#include "convert/repack.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <span>
#include <utility>

#include "base/refuse_option.h"
#include "base/text.h"
#include "catalog/assembled_file.h"
#include "codec/block_grid.h"
#include "codec/encode.h"
#include "codec/fp4/blocks.h"
#include "convert/choose/choose.h"
#include "convert/choose/quantize_config.h"
#include "convert/values.h"
#include "loadstone/quantized_tensors.h"
#include "loadstone/recipe_builder.h"

namespace loadstone {

namespace {

// Returns the extents that are not 1, because styles differ in dims of 1.
std::vector<std::uint64_t> squeezed(const Shape& shape) {
  auto extents = shape.extents();
  std::erase(extents, std::uint64_t{1});
  return extents;
}

// Not thread-safe.
class Repacker {
 public:
  Repacker(const std::shared_ptr<const Catalog>& catalog, const ConvertOptions& options,
           std::vector<Finding>& findings)
      : catalog_(*catalog),
        style_(*options.quantize.style),
        is_lossless_(options.require_lossless),
        findings_(findings),
        builder_(catalog),
        files_(catalog_.shards().size()) {}

  Values run() {
    const QuantizedTensors& quantized = catalog_.quantized();
    findings_.insert(findings_.end(), quantized.findings().begin(), quantized.findings().end());
    for (const QuantizedTensor& each : quantized.tensors()) {
      if (each.is_readable()) repack(each);
    }
    for (std::uint32_t i = 0; i < catalog_.tensors().size(); ++i) {
      if (catalog_.tensors()[i].encoding == Encoding(BlockFormat::mxfp4)) repack_blocks(i);
    }
    if (made_.repacked.empty() && lossy_.empty() && quantized.empty()) {
      refuse_option("style", "a style was passed, but no tensor of the output is quantized",
                    std::string(name(style_)));
    }
    report();
    report_rounded();
    made_.recipes = builder_.finish();
    for (TargetRecipe& recipe : made_.recipes.targets) {
      const auto source = inverted_.find(recipe.target);
      if (source != inverted_.end()) recipe.decided_by.push_back(source->second);
    }
    return std::move(made_);
  }

 private:
  using Value = RecipeBuilder::Value;
  // Reason why the style cannot store a tensor; empty if the tensor was added.
  using Reason = std::string;

  void repack(const QuantizedTensor& quantized) {
    if (Reason problem = add(quantized); !problem.empty()) {
      refuse(quantized.name, quantized.shape(), quantized.encoding, std::move(problem));
    }
    const auto& sources = quantized.decoding.sources;
    made_.dropped.insert(made_.dropped.end(), sources.begin(), sources.end());
    made_.dropped.insert(made_.dropped.end(), quantized.unneeded.begin(), quantized.unneeded.end());
  }

  // Repacks a tensor of GGUF blocks, in which a scale precedes the codes.
  void repack_blocks(std::uint32_t tensor) {
    const TensorInfo& info = catalog_.tensors()[tensor];
    constexpr std::string_view encoding = "mxfp4";
    const WrittenEncoding* const written = find_written_encoding(encoding);
    QuantizedLayout form;
    Reason problem = prepare(written, info.name, info.shape, form);
    if (problem.empty()) {
      const Decoding parts[] = {mxfp4_codes_of(tensor, info.shape),
                                mxfp4_scales_of(tensor, info.shape)};
      std::vector<Value> values;
      for (const Decoding& part : parts) {
        values.push_back(
            builder_.decode(part.kernel, {builder_.source(info.name)}, part.shape, part.dtype));
      }
      add_components(info.name, info.shape, *written, form, values);
    } else {
      refuse(info.name, info.shape, encoding, std::move(problem));
    }
    made_.dropped.push_back(tensor);
  }

  // Returns the reason why the style cannot store the tensor, if there is one; sets the layout.
  [[nodiscard]] Reason prepare(const WrittenEncoding* encoding, std::string_view target,
                               const Shape& shape, QuantizedLayout& form) const {
    if (encoding == nullptr || encoding->is_bitsandbytes() ||
        encoding->names(naming_style(*encoding, style_)).empty()) {
      return fmt::format("files of the style {} cannot store this encoding", name(style_));
    }
    if (shape.rank() != 2 || !target.ends_with(".weight")) {
      return "only matrices whose names end in '.weight' can be repacked";
    }
    const Quantization quantization = {.encoding = std::string(encoding->name)};
    if (auto problem = prepare_quantization(quantization, shape, Dtype::bf16, form)) {
      return problem->message;
    }
    return {};
  }

  Reason add(const QuantizedTensor& quantized) {
    const WrittenEncoding* const encoding = find_written_encoding(quantized.encoding);
    if (quantized.has_zero_points) return "it has zero points";
    QuantizedLayout form;
    Reason problem = prepare(encoding, quantized.name, quantized.shape(), form);
    if (!problem.empty()) return problem;
    const auto& sources = quantized.decoding.sources;
    if (quantized.is_transposed || form.parts.size() != sources.size()) {
      return "its components have a different layout";
    }
    std::vector<Value> values;
    std::vector<bool> is_computed(sources.size());
    double error = 0;
    for (std::size_t i = 0; i < sources.size(); ++i) {
      const TensorInfo& source = catalog_.tensors()[sources[i]];
      const QuantizedPart& part = form.parts[i];
      const bool is_float = is_wide_float(part.dtype);
      if (!is_float && source.encoding != Encoding(part.dtype)) {
        return fmt::format("'{}' is {}, not {}", printable(source.name), source.encoding.name(),
                           name(part.dtype));
      }
      if (squeezed(source.shape) != squeezed(part.shape)) {
        return fmt::format("'{}' is {}, not {}", printable(source.name), source.shape.text(),
                           part.shape.text());
      }
      const bool is_divisor = i == 2 && divides(quantized);
      is_computed[i] = is_divisor != component(*encoding, part).is_inverted;
      const auto value =
          is_computed[i] ? inverted(sources[i], is_divisor, form_of(*encoding, part), error)
                         : builder_.reshape(builder_.source(source.name), form_of(*encoding, part));
      if (!value) {
        return fmt::format("'{}' has no {}inverse in F32", printable(source.name),
                           is_lossless_ ? "exact " : "");
      }
      values.push_back(*value);
    }
    add_components(quantized.name, quantized.shape(), *encoding, form, values);
    made_.repacked.back().error = error;
    for (std::size_t i = 0; i < sources.size(); ++i) {
      if (is_computed[i]) inverted_.emplace(made_.repacked.back().targets[i], sources[i]);
    }
    return {};
  }

  [[nodiscard]] const ComponentName& component(const WrittenEncoding& encoding,
                                               const QuantizedPart& part) const {
    return component_of(encoding, style_, part.name);
  }
  [[nodiscard]] Shape form_of(const WrittenEncoding& encoding, const QuantizedPart& part) const {
    return shape_in_file(component(encoding, part).shape, part.shape);
  }
  // Returns true if scales are divided by the last component.
  [[nodiscard]] static bool divides(const QuantizedTensor& quantized) {
    const DecodeKernel* const kernel = find_decode_kernel(quantized.decoding.kernel);
    return kernel != nullptr && kernel->divides_by_outer;
  }

  // Returns the reciprocal of a scale. If it changes a decoded value, sets `error`, or returns
  // nullopt if the conversion must be lossless.
  std::optional<Value> inverted(std::uint32_t tensor, bool is_divisor, const Shape& shape,
                                double& error) {
    const TensorInfo& info = catalog_.tensors()[tensor];
    auto& file = files_[info.shard];
    if (file == nullptr) file = open_shard(catalog_.storage(), catalog_, info.shard);
    std::vector<float> numbers(info.byte_count() / sizeof(float));
    file->read(info.offset_begin, std::as_writable_bytes(std::span(numbers)));
    for (float& number : numbers) {
      const auto same = is_divisor ? same_factor(number) : same_divisor(number);
      const float inverse = same.value_or(1.0F / number);
      if ((!same && is_lossless_) || !std::isnormal(inverse)) return std::nullopt;
      if (!same) {
        error = std::max(error, is_divisor ? change_of_scales(inverse, number)
                                           : change_of_scales(number, inverse));
      }
      number = inverse;
    }
    return builder_.constant(std::as_bytes(std::span(numbers)), shape, Dtype::f32);
  }

  void add_components(const std::string& target, const Shape& shape,
                      const WrittenEncoding& encoding, const QuantizedLayout& form,
                      const std::vector<Value>& values) {
    RepackedTensor& tensor = made_.repacked.emplace_back();
    tensor.name = target;
    tensor.shape = shape;
    tensor.quantization.encoding = encoding.name;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::string_view suffix = component(encoding, form.parts[i]).suffix;
      tensor.targets.push_back(component_name(target, i, suffix));
      builder_.add(tensor.targets.back(), values[i]);
    }
    if (encoding.constants == nullptr) return;
    for (const auto& each : encoding.constants(tensor.quantization, shape, form.dtype)) {
      tensor.targets.push_back(fmt::format("{}.{}", module_of(target), each.suffix));
      builder_.add(tensor.targets.back(), builder_.constant(*each.bytes, each.shape, each.dtype));
    }
  }

  void refuse(const std::string& target, const Shape& shape, std::string_view encoding,
              Reason problem) {
    Lossy& lossy = lossy_[{std::string(encoding), folded_name(target)}];
    if (lossy.targets.empty()) lossy.problem = std::move(problem);
    lossy.is_stack = shape.rank() > 2 && style_ == QuantizeStyle::compressed_tensors;
    lossy.targets.push_back(target);
  }

  void report() {
    for (auto& [key, lossy] : lossy_) {
      const Alike tensors = {lossy.targets.size(), lossy.targets.front()};
      findings_.push_back(
          {.severity = Severity::error,
           .code = "convert.lossy",
           .target = lossy.targets.front(),
           .sources = lossy.targets,
           .message = fmt::format(
               "{} cannot be repacked from {} to the style {} without changing values: {}",
               tensors.text(), key.first, name(style_), lossy.problem),
           .suggestion = fmt::format(
               "to quantize the values again, pass --quantize{}; to decode them, pass --dequantize "
               "instead of --style",
               lossy.is_stack ? " and omit --style" : ""),
           .found = key.first});
    }
  }

  void report_rounded() {
    std::vector<std::string> rounded;
    for (const RepackedTensor& each : made_.repacked) {
      if (each.error > 0) rounded.push_back(each.name);
    }
    if (rounded.empty()) return;
    const std::string first = rounded.front();
    findings_.push_back(
        {.severity = Severity::warning,
         .code = "convert.rounded",
         .target = first,
         .sources = std::move(rounded),
         .message = fmt::format("{}; all codes are kept; the first of these tensors is '{}'",
                                rounding_text(made_.repacked), printable(first)),
         .suggestion = "to reject such changes, pass --require-lossless (require_lossless=)"});
  }

  struct Lossy {
    Reason problem;         // problem of the first tensor
    bool is_stack = false;  // true if only the default style has a layout for the tensors
    std::vector<std::string> targets;
  };

  const Catalog& catalog_;
  const QuantizeStyle style_;
  const bool is_lossless_;
  std::vector<Finding>& findings_;
  RecipeBuilder builder_;
  std::vector<std::shared_ptr<ByteSource>> files_;
  Values made_;
  std::map<std::string, std::uint32_t> inverted_;  // indices of the original scales, by target
  // By encoding and name with * for numbers.
  std::map<std::pair<std::string, std::string>, Lossy> lossy_;
};

}  // namespace

bool repacks(const ConvertOptions& options) noexcept {
  return options.quantize.style && options.quantize.formats.empty();
}

std::set<std::string_view> repacked_targets(const std::vector<RepackedTensor>& repacked) {
  std::set<std::string_view> targets;
  for (const RepackedTensor& tensor : repacked) {
    targets.insert(tensor.targets.begin(), tensor.targets.end());
  }
  return targets;
}

Values repacked_values(const std::shared_ptr<const Catalog>& catalog, const ConvertOptions& options,
                       std::vector<Finding>& findings) {
  return Repacker(catalog, options, findings).run();
}

std::string rounding_text(const std::vector<RepackedTensor>& repacked) {
  std::size_t rounded = 0;
  double largest = 0;
  for (const RepackedTensor& each : repacked) {
    rounded += each.error > 0 ? 1 : 0;
    largest = std::max(largest, each.error);
  }
  if (rounded == 0) return {};
  return fmt::format(
      "the global {} of {} of {} {} rounded, because F32 has no exact inverse, which "
      "changes scales by at most {:.2g} %",
      rounded == 1 ? "scale" : "scales", rounded, counted(repacked.size(), "tensor"),
      rounded == 1 ? "is" : "are", 100 * largest);
}

}  // namespace loadstone
