#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/only_errors.h"
#include "base/refuse_option.h"
#include "base/text.h"
#include "boxes/check_boxes.h"
#include "boxes/decodings.h"
#include "boxes/merges.h"
#include "catalog/reading_threads.h"
#include "codec/tensor_table.h"
#include "loadstone/error.h"
#include "plan/costs.h"
#include "plan/devices.h"
#include "plan/planner.h"
#include "storage/remote_path.h"

namespace loadstone {

namespace {

// The skeleton is validated before Production's constructor, which reads every name.
const Skeleton& validated(const Skeleton& skeleton) {
  skeleton.validate();
  return skeleton;
}

Stripping stripping(const Catalog& catalog, const Skeleton& skeleton, const PlanOptions& options) {
  if (options.caller.knows_all_sources) return {.rules = options.rules, .findings = {}};
  if (options.strip_prefixes) {
    return strip_prefix(catalog, skeleton, *options.strip_prefixes, options.rules);
  }
  const auto& usual = defaults::strip_prefixes;
  return strip_prefix(catalog, skeleton, {usual.begin(), usual.end()}, options.rules);
}

std::vector<std::string> patterns_of(const PlanOptions& options) {
  std::vector<std::string> patterns;
  for (const auto& [pattern, policy] : options.missing_patterns) patterns.push_back(pattern);
  return patterns;
}

}  // namespace

Planner::Planner(std::shared_ptr<const Catalog> catalog, const Skeleton& skeleton,
                 const PlanOptions& options)
    : skeleton_(validated(skeleton)),
      options_(options),
      stripping_(stripping(*catalog, skeleton, options)),
      rules_(stripping_.rules),
      missing_patterns_(patterns_of(options), "missing"),
      production_(*catalog, rules_, options),
      codes_(*catalog),
      accounted_(catalog->tensors().size(), false) {
  plan_.catalog = std::move(catalog);
}

void Planner::check_options() const {
  if (options_.dtype && options_.dtype_from_file) {
    refuse_option("dtype", "pass either a dtype or \"auto\" (the file's dtype), not both",
                  std::string(name(*options_.dtype)));
  }
  if (options_.dtype &&
      (kind(*options_.dtype) != DtypeKind::floating || bits(*options_.dtype) % 8 != 0)) {
    refuse_option("dtype", "parameters can be cast only to a float dtype with whole bytes",
                  std::string(name(*options_.dtype)));
  }
  if (options_.staging_bytes_max == 0)
    refuse_option("staging_bytes_max", "the size of the staging pool must be greater than 0");
  if (options_.local_ranks == 0)
    refuse_option("local_ranks", "the number of ranks must be 1 or more: it includes this process",
                  "0");
  if (options_.device_map.mode && !options_.device_map.entries.empty()) {
    refuse_option("device_map", "pass either a computed device map or its entries, not both");
  }
  const std::size_t given = 1 + options_.adapters.size();
  const std::size_t there = std::max<std::size_t>(plan_.catalog->checkpoints().size(), 1);
  if (given > 1 && given != there) {
    refuse_option("adapters", "each checkpoint after the first in the catalog must be an adapter",
                  fmt::format("{} adapters and {} checkpoints", given - 1, there));
  }
  if (options_.tie == TiePolicy::keep && options_.adapters.empty()) {
    refuse_option("tie", "this option needs adapters (lora)", "keep");
  }
  const auto is_factor = [](const MergeAdapter& adapter) { return std::isfinite(adapter.factor); };
  if (!std::ranges::all_of(options_.adapters, is_factor))
    refuse_option("adapters", "a factor must be finite");
  std::vector<std::string> devices;
  for (const auto& [device, bytes] : options_.max_memory) {
    devices.push_back(device_name(device));
    if (!is_device_name(devices.back())) refuse_option("max_memory", unknown_device(device));
    if (devices.back() == "meta")
      refuse_option("max_memory", "the device meta cannot have a memory limit", device);
  }
  std::ranges::sort(devices);
  const auto twice = std::ranges::adjacent_find(devices);
  if (twice != devices.end())
    refuse_option("max_memory", "two limits are given for the same device", *twice);
  std::vector<std::string_view> paths;
  for (const auto& [path, device] : options_.device_map.entries) paths.push_back(path);
  std::ranges::sort(paths);
  const auto same = std::ranges::adjacent_find(paths);
  if (same != paths.end())
    refuse_option("device_map", "two devices are given for the same module", std::string(*same));
}

// Validates recipes, because callers can write them freely.
void Planner::check_recipes() {
  std::uint64_t constant_bytes = 0;
  for (const TargetRecipe& recipe : options_.recipes.targets) {
    if (recipe.merge != nullptr) keep_numbers(recipe);
    if (recipe.merge != nullptr && recipe.boxes.empty() && recipe.shape.numel() != 0u) {
      throw Error("plan.recipe", "a merge needs boxes, to which its terms are added",
                  {.tensor = recipe.target, .field = "recipes"});
    }
    if (recipe.constant == nullptr) continue;
    constant_bytes += recipe.constant->size();
    if (!recipe.boxes.empty()) {
      throw Error("plan.recipe", "a recipe cannot have both a constant and boxes",
                  {.tensor = recipe.target, .field = "recipes"});
    }
    if (constant_bytes <= constant_bytes_max) continue;
    throw Error("plan.recipe", "the constants together are too large",
                {.tensor = recipe.target,
                 .field = "recipes",
                 .found = human_bytes(constant_bytes),
                 .expected = "at most " + human_bytes(constant_bytes_max)});
  }
  PreparedDecoder form;
  for (std::size_t i = 0; i < plan_.decodings.size(); ++i) {
    if (auto problem = check_decoding(plan_.catalog->tensors(), plan_.decodings[i], form)) {
      throw_problem("plan.recipe", *problem, {.field = fmt::format("decodings[{}]", i)});
    }
  }
}

Plan Planner::run(SinkKind sink) && {
  check_options();
  require_local(options_.offload_folder);
  plan_.offload_folder = options_.offload_folder;
  plan_.staging_bytes_max = options_.staging_bytes_max;
  plan_.local_ranks = options_.local_ranks;
  plan_.allow_non_finite = options_.allow_non_finite;
  plan_.threads = std::max(reading_threads(*plan_.catalog, options_.threads, defaults::threads_max),
                           options_.threads == 0 ? defaults::first_readers_max : 1);
  plan_.decodings = options_.recipes.decodings;
  check_recipes();
  plan_.findings = plan_.catalog->findings();
  for (Finding& finding : stripping_.findings) add(std::move(finding));
  plan_.targets.reserve(skeleton_.targets.size());
  for (const Target& target : skeleton_.targets) {
    PlannedTarget& planned = plan_.targets.emplace_back();
    planned.name = target.name;
    planned.kind = target.kind;
    planned.shape = target.shape;
    planned.dtype = target.dtype;
  }
  find_groups();
  for (const auto& [target, quantization] : options_.quantize) {
    if (!index_.contains(target)) refuse_option("quantize", "no target has this name", target);
  }
  mark_taken_codes();
  for (std::size_t i = 0; i < roots_.size(); ++i) {
    if (roots_[i] == i) resolve(i);
  }
  merge_adapters();
  encode_exactly();
  refuse_lone_codes();
  for (std::size_t i = 0; i < roots_.size(); ++i) {
    if (roots_[i] != i) resolve_tie(i);
  }
  take_slices();
  for (Finding& finding : lacking_.findings()) add(std::move(finding));
  report_contests();
  report_unused_scales();
  if (sink == SinkKind::memory) refuse_transforms();
  if (sink != SinkKind::memory || !report_lone_adapter()) report_unexpected();
  report_kept();
  report_patterns();
  suggest();
  fold_casts();
  place();
  if (sink == SinkKind::memory) {
    count_costs(plan_);
    check_budget();
  }
  // Boxes come from rules and from recipes, so a single check here covers all of them.
  for (const PlannedTarget& target : plan_.targets) {
    if (target.recipe.origin != Origin::checkpoint) continue;
    const std::uint64_t elements = target.shape.numel().value_or(0);
    auto defect =
        check_boxes(target.recipe.boxes, elements, plan_.catalog->tensors(), plan_.decodings);
    if (!defect && target.recipe.merge != nullptr) {
      defect =
          check_merge(*target.recipe.merge, elements, plan_.catalog->tensors(), plan_.decodings);
    }
    if (defect)
      throw Error("internal", "a rule produced boxes that do not fit: " + defect->message,
                  {.tensor = target.name, .found = defect->found, .expected = defect->expected});
  }
  sort_findings(plan_.findings);
  return std::move(plan_);
}

Plan make_plan(std::shared_ptr<const Catalog> catalog, const Skeleton& skeleton,
               const PlanOptions& options) {
  return only_errors([&] {
    if (catalog == nullptr) refuse_option("catalog", "the catalog is null");
    return Planner(std::move(catalog), skeleton, options).run(SinkKind::memory);
  });
}

}  // namespace loadstone
