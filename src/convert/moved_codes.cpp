#include "convert/moved_codes.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <utility>

#include "base/text.h"
#include "catalog/components.h"
#include "loadstone/catalog.h"

namespace loadstone {

namespace {

constexpr std::string_view advice =
    "make numbers of them with --dequantize (and --quantize them again), or leave them under their "
    "own names";

// The output as it would be opened: names, dtypes and ranks, in the order of the targets.
Catalog catalog_of_output(const Plan& plan) {
  std::vector<TensorInfo> tensors;
  tensors.reserve(plan.targets.size());
  for (const PlannedTarget& target : plan.targets) {
    TensorInfo& tensor = tensors.emplace_back();
    tensor.name = target.name;
    tensor.encoding = target.dtype;
    tensor.shape = target.shape;
    tensor.offset_begin = tensor.offset_end = tensors.size();
  }
  return {{}, std::vector<Shard>(1), std::move(tensors), {}, {}};
}

// Not thread-safe.
class Check {
 public:
  explicit Check(const Plan& plan)
      : plan_(plan), catalog_(*plan.catalog), before_(catalog_) {}

  std::vector<Finding> run() {
    std::vector<Finding> findings;
    if (before_.empty()) return findings;
    const Catalog output = catalog_of_output(plan_);
    const ComponentsByData after(output);
    for (std::uint32_t i = 0; i < plan_.targets.size(); ++i) {
      const std::set<std::uint32_t> wanted = companions_of(plan_.targets[i]);
      if (wanted.empty()) continue;
      std::set<std::uint32_t> given;
      if (const Components* const found = after.find(i)) {
        for (const std::uint32_t companion : found->companions()) {
          add_sources(plan_.targets[companion], given);
        }
      }
      if (!std::ranges::includes(given, wanted)) findings.push_back(finding_of(i, wanted));
    }
    return findings;
  }

 private:
  static void add_sources(const PlannedTarget& target, std::set<std::uint32_t>& sources) {
    for (const Box& box : target.recipe.boxes) {
      if (box.decoding == no_decoding) sources.insert(box.source);
    }
  }

  // What gives the codes in the target their meaning, in the source.
  [[nodiscard]] std::set<std::uint32_t> companions_of(const PlannedTarget& target) const {
    std::set<std::uint32_t> sources;
    add_sources(target, sources);
    std::set<std::uint32_t> companions;
    for (const std::uint32_t source : sources) {
      const Components* const found = before_.find(source);
      if (found == nullptr) continue;
      const auto all = found->companions();
      companions.insert(all.begin(), all.end());
    }
    return companions;
  }

  [[nodiscard]] Finding finding_of(std::uint32_t index,
                                   const std::set<std::uint32_t>& companions) const {
    const PlannedTarget& target = plan_.targets[index];
    Finding finding = {.severity = Severity::error,
                       .code = "plan.encoding",
                       .target = target.name,
                       .suggestion = std::string(advice)};
    std::set<std::uint32_t> sources;
    add_sources(target, sources);
    for (const std::uint32_t source : sources) {
      finding.sources.push_back(catalog_.tensors()[source].name);
    }
    const std::string& scale = catalog_.tensors()[*companions.begin()].name;
    finding.message = fmt::format(
        "'{}' would hold the {} codes of '{}' where nothing finds their scales: '{}' does not go "
        "with them",
        printable(target.name), name(target.dtype), printable(finding.sources.front()),
        printable(scale));
    finding.sources.push_back(scale);
    finding.found = std::string(name(target.dtype));
    return finding;
  }

  const Plan& plan_;
  const Catalog& catalog_;
  ComponentsByData before_;
};

}  // namespace

std::vector<Finding> check_moved_codes(const Plan& plan) { return Check(plan).run(); }

}  // namespace loadstone
