#include "plan/codes.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/text.h"

namespace loadstone {

namespace {

constexpr std::string_view advice =
    "make numbers of the checkpoint with `loadstone convert --dequantize`, or load it into modules "
    "that are made for its encoding";

std::string quoted(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) {
    text += fmt::format("{}'{}'", text.empty() ? "" : ", ", printable(name));
  }
  return text;
}

}  // namespace

bool Codes::keep_dtype(std::uint32_t tensor, Dtype dtype) const {
  if (components_.is_companion(tensor)) return true;
  return components_.find(tensor) != nullptr &&
         catalog_.tensors()[tensor].encoding == Encoding(dtype);
}

std::optional<Finding> Codes::refuse_cast(std::uint32_t source, std::string_view target,
                                          Dtype wanted, Dtype asked) const {
  const Components* const found = components_.find(source);
  if (found == nullptr) return std::nullopt;
  const TensorInfo& data = catalog_.tensors()[source];
  if (data.encoding == Encoding(wanted) && wanted == asked) return std::nullopt;
  Finding finding = {.severity = Severity::error,
                     .code = "plan.encoding",
                     .target = std::string(target),
                     .sources = {data.name},
                     .suggestion = std::string(advice),
                     .found = std::string(data.encoding.name()),
                     .expected = std::string(name(asked))};
  const auto companions = found->companions();
  if (companions.empty()) {
    finding.code = "q.scale_missing";
    finding.suggestion = "without them the codes mean nothing: fetch or write the checkpoint again";
    finding.message =
        fmt::format("'{}' wants {} numbers, '{}' holds {} codes, and their scales are missing ({})",
                    printable(target), name(asked), printable(data.name), data.encoding.name(),
                    quoted(found->missing));
    finding.sources.insert(finding.sources.end(), found->missing.begin(), found->missing.end());
    return finding;
  }
  for (const std::uint32_t companion : companions) {
    finding.sources.push_back(catalog_.tensors()[companion].name);
  }
  finding.message = fmt::format(
      "'{}' wants {} numbers, but '{}' holds the {} codes of a quantized tensor, which "
      "need {} and are not cast",
      printable(target), name(asked), printable(data.name), data.encoding.name(),
      quoted({finding.sources.begin() + 1, finding.sources.end()}));
  return finding;
}

std::optional<Finding> Codes::refuse_lone(std::uint32_t source, std::string_view target,
                                          const std::vector<bool>& delivered) const {
  const Components* const found = components_.find(source);
  if (found == nullptr) return std::nullopt;
  const TensorInfo& data = catalog_.tensors()[source];
  for (const std::uint32_t scale : {found->scale, found->scale_of_scales}) {
    if (scale == Components::none || delivered[scale]) continue;
    const std::string& missing = catalog_.tensors()[scale].name;
    return Finding{
        .severity = Severity::error,
        .code = "plan.encoding",
        .target = std::string(target),
        .sources = {data.name, missing},
        .message = fmt::format("'{}' would get the {} codes of '{}' without their scales: nothing "
                               "takes '{}'",
                               printable(target), data.encoding.name(), printable(data.name),
                               printable(missing)),
        .suggestion = std::string(advice),
        .found = std::string(data.encoding.name())};
  }
  return std::nullopt;
}

void Codes::mark_companions(std::uint32_t source, std::vector<bool>& marked) const {
  const Components* const found = components_.find(source);
  if (found == nullptr) return;
  for (const std::uint32_t companion : found->companions()) marked[companion] = true;
}

}  // namespace loadstone
