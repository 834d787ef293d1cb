#include "plan/codes.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "base/text.h"
#include "boxes/merges.h"

namespace loadstone {

namespace {

constexpr std::string_view component_advice =
    "give the target the shape and the floating-point dtype of the decoded values, or load the "
    "codes together with their scales into modules made for the encoding";

// Returns the tensors that a module needs in addition to the codes: the scales, and the group order
// if there is one.
std::vector<std::uint32_t> needed(const QuantizedTensor& quantized) {
  std::vector<std::uint32_t> all = quantized.scales;
  const auto& sources = quantized.decoding.sources;
  if (quantized.decoding.group_size > 0) all.assign(sources.begin() + 1, sources.end());
  return all;
}

}  // namespace

Codes::Codes(const Catalog& catalog)
    : catalog_(catalog),
      quantized_(catalog.quantized()),
      is_taken_(catalog.tensors().size(), false),
      is_known_(catalog.tensors().size(), false) {}

SourceUse Codes::source_use(std::uint32_t tensor, Dtype asked, const Shape* shape) const {
  const bool is_floating = kind(asked) == DtypeKind::floating;
  const Encoding encoding = catalog_.tensors()[tensor].encoding;
  const QuantizedTensor* const quantized = quantized_.find(tensor);
  const auto is_provided = [&](std::uint32_t scale) {
    return is_taken_[scale] || is_known_[scale];
  };
  if (!encoding.is_dtype()) {  // A block format contains all its scales, or all except one.
    const bool is_whole =
        quantized == nullptr || std::ranges::all_of(quantized->scales, is_provided);
    if (asked == Dtype::u8) return is_whole ? SourceUse::component : SourceUse::neither;
    return is_floating ? SourceUse::numbers : SourceUse::neither;
  }
  if (quantized == nullptr) {
    if (!quantized_.is_companion(tensor)) return SourceUse::plain;
    return encoding == Encoding(asked) ? SourceUse::component : SourceUse::neither;
  }
  const auto is_taken = [&](std::uint32_t scale) { return is_taken_[scale]; };
  if (encoding == Encoding(asked) &&
      (shape == nullptr || *shape == catalog_.tensors()[tensor].shape)) {
    return std::ranges::all_of(needed(*quantized), is_provided) ? SourceUse::component
                                                                : SourceUse::neither;
  }
  const bool is_alone = std::ranges::none_of(quantized->companions(), is_taken);
  return is_floating && is_alone ? SourceUse::numbers : SourceUse::neither;
}

Finding Codes::between(const QuantizedTensor& quantized, std::string_view target) const {
  Finding finding = {.severity = Severity::error,
                     .code = "plan.component",
                     .target = std::string(target),
                     .suggestion = std::string(component_advice)};
  if (quantized.data != QuantizedTensor::none) {
    const TensorInfo& data = catalog_.tensors()[quantized.data];
    finding.sources.push_back(data.name);
    finding.found = data.encoding.name();
  }
  for (const std::uint32_t companion : quantized.companions()) {
    finding.sources.push_back(catalog_.tensors()[companion].name);
  }
  return finding;
}

// Returns the quantized tensor that has this tensor as its codes or as a scale. Returns null for
// blocks without a separate scale.
const QuantizedTensor* Codes::owner_of(std::uint32_t tensor) const {
  if (const QuantizedTensor* const own = quantized_.find(tensor)) return own;
  const auto& all = quantized_.tensors();
  const auto found = std::ranges::find_if(all, [&](const QuantizedTensor& each) {
    const auto companions = each.companions();
    return std::ranges::find(companions, tensor) != companions.end();
  });
  return found == all.end() ? nullptr : &*found;
}

Finding Codes::refuse(std::uint32_t tensor, std::string_view target, Dtype asked) const {
  const TensorInfo& source = catalog_.tensors()[tensor];
  const QuantizedTensor* const quantized = owner_of(tensor);
  Finding finding =
      between(quantized != nullptr ? *quantized : QuantizedTensor{.data = tensor}, target);
  const bool is_scale = quantized != nullptr && quantized->data != tensor;
  finding.found = source.encoding.name();
  finding.expected = name(asked);
  finding.message = fmt::format("'{}' needs {}, but '{}' contains {} {} of a quantized tensor",
                                printable(target), name(asked), printable(source.name),
                                source.encoding.name(), is_scale ? "scales" : "codes");
  if (is_scale) finding.message += ", which loadstone does not cast";
  if (is_scale || quantized == nullptr) return finding;
  const bool is_code = source.encoding == Encoding(asked);
  for (const std::uint32_t companion : quantized->companions()) {
    const std::string scale = printable(catalog_.tensors()[companion].name);
    if (is_code && !is_taken_[companion] && !is_known_[companion]) {
      finding.message +=
          fmt::format(", and no target gets '{}', without which the codes have no meaning", scale);
      break;
    }
    if (!is_code && is_taken_[companion]) {
      finding.message += fmt::format(", and another target gets its '{}' unchanged", scale);
      break;
    }
  }
  return finding;
}

std::optional<Finding> Codes::refuse_as_it_is(std::uint32_t tensor, std::string_view target,
                                              Dtype dtype,
                                              const std::vector<bool>& delivered) const {
  const QuantizedTensor* const quantized = quantized_.find(tensor);
  if (quantized == nullptr) return std::nullopt;
  const TensorInfo& data = catalog_.tensors()[tensor];
  const auto is_left = [&](std::uint32_t scale) { return !delivered[scale]; };
  const std::vector<std::uint32_t> scales = needed(*quantized);
  const auto left = std::ranges::find_if(scales, is_left);
  const bool is_cast = data.encoding != Encoding(dtype);
  if (!is_cast && left == scales.end()) return std::nullopt;
  if (quantized->companions().empty()) {
    Finding finding = quantized->defect;
    finding.target = target;
    return finding;
  }
  Finding finding = between(*quantized, target);
  finding.expected = name(dtype);
  finding.message =
      is_cast ? fmt::format(
                    "'{}' needs {} values, but '{}' contains {} codes of a quantized tensor, which "
                    "need '{}' and which loadstone does not cast",
                    printable(target), name(dtype), printable(data.name), data.encoding.name(),
                    printable(finding.sources.back()))
              : fmt::format(
                    "'{}' would get the {} codes of '{}' without their scales: no target gets '{}'",
                    printable(target), data.encoding.name(), printable(data.name),
                    printable(catalog_.tensors()[*left].name));
  return finding;
}

std::optional<Codes::Lone> Codes::find_lone(const PlannedTarget& target,
                                            const std::vector<bool>& delivered) const {
  const Dtype read_as = target.recipe.merge != nullptr ? Dtype::f32 : target.dtype;
  std::optional<Lone> first;
  for_each_box(target.recipe, [&](const Box& box) {
    if (box.decoding != no_decoding || first) return;
    auto error = refuse_as_it_is(box.source, target.name, read_as, delivered);
    if (error) first = {box.source, *std::move(error)};
  });
  return first;
}

std::vector<bool> delivered_codes(const Plan& plan) {
  std::vector<bool> delivered(plan.catalog->tensors().size(), false);
  for (const PlannedTarget& target : plan.targets) {
    if (target.recipe.merge != nullptr) continue;  // always values
    for (const Box& box : target.recipe.boxes) {
      if (box.decoding == no_decoding) delivered[box.source] = true;
    }
  }
  return delivered;
}

void Codes::mark_components(std::uint32_t tensor, std::vector<bool>& marked) const {
  marked[tensor] = true;
  const QuantizedTensor* const quantized = quantized_.find(tensor);
  if (quantized == nullptr) return;
  for (const std::uint32_t companion : quantized->companions()) marked[companion] = true;
  for (const std::uint32_t source : quantized->decoding.sources) marked[source] = true;
  for (const std::uint32_t other : quantized->unneeded) marked[other] = true;
}

}  // namespace loadstone
