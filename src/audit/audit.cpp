#include "loadstone/audit.h"

#include <fmt/format.h>

#include <map>
#include <string_view>
#include <utility>

#include "base/only_errors.h"
#include "base/text.h"
#include "loadstone/error.h"
#include "loadstone/name_hash.h"
#include "plan/origins.h"

namespace loadstone {

namespace {

constexpr std::size_t names_shown_max = 5;

enum class TargetVerdict { real, on_meta, unaccounted, not_held };

bool is_offloaded(Delivery delivery) {
  return delivery == Delivery::disk_write || delivery == Delivery::disk_keep;
}

// Judges a target by its own entry. The caller follows ties.
TargetVerdict judge(const PlannedTarget& target, const Provenance& item) {
  const std::uint64_t bytes = target.byte_count();
  const bool complete = item.bytes_written >= bytes;
  if (is_offloaded(target.delivery)) {
    const bool on_disk = target.delivery == Delivery::disk_keep ? !item.sources.empty() : complete;
    return on_disk ? TargetVerdict::not_held : TargetVerdict::unaccounted;
  }
  switch (origin_row(item.origin).proof) {
    case Proof::sources:
      if (target.delivery == Delivery::none) return TargetVerdict::on_meta;
      if (target.delivery == Delivery::file_view) {
        return item.sources.empty() ? TargetVerdict::unaccounted : TargetVerdict::real;
      }
      return complete && !item.sources.empty() ? TargetVerdict::real : TargetVerdict::unaccounted;
    case Proof::bytes:
      return complete ? TargetVerdict::real : TargetVerdict::unaccounted;
    case Proof::reason:
      return item.reason.empty() ? TargetVerdict::on_meta : TargetVerdict::not_held;
    case Proof::memory:
      break;
  }
  return target.device == "meta" ? TargetVerdict::on_meta : TargetVerdict::real;
}

// A mistake in the report would hide a target, so both sides are matched by name, not by position.
NameMap<const Provenance*> by_name(const Report& report) {
  NameMap<const Provenance*> index;
  for (const Provenance& item : report.provenance) index.emplace(item.target, &item);
  return index;
}

[[noreturn]] void refuse(const char* code, const std::vector<std::string>& names,
                         std::string_view what) {
  throw Error(code,
              fmt::format("{} {}: {}", counted(names.size(), "tensor"), what,
                          name_list(names, names.size(), names_shown_max)),
              {.tensor = names.front()});
}

}  // namespace

static Audit audited(const Plan& plan, const Report& report) {
  Audit result;
  result.provenance = report.provenance;
  const auto entries = by_name(report);
  NameMap<TargetVerdict> verdicts;
  NameSet ties;
  for (const PlannedTarget& target : plan.targets) {
    if (target.recipe.origin == Origin::tie) ties.insert(target.name);
    const auto found = entries.find(target.name);
    verdicts[target.name] =
        found == entries.end() ? TargetVerdict::unaccounted : judge(target, *found->second);
  }
  for (const PlannedTarget& target : plan.targets) {
    TargetVerdict verdict = verdicts[target.name];
    if (target.recipe.origin == Origin::tie && verdict == TargetVerdict::real) {
      // A tie has the verdict of its root. A tie of nothing, or of a tie, has no value.
      const auto root = verdicts.find(target.recipe.tie_of);
      const bool known = root != verdicts.end() && !ties.contains(target.recipe.tie_of);
      verdict = known ? root->second : TargetVerdict::unaccounted;
    }
    if (verdict == TargetVerdict::on_meta) result.on_meta.push_back(target.name);
    if (verdict == TargetVerdict::unaccounted) result.unaccounted.push_back(target.name);
    if (verdict == TargetVerdict::not_held) result.not_held.push_back(target.name);
  }
  return result;
}

Audit audit(const Plan& plan, const Report& report) {
  return only_errors([&] { return audited(plan, report); });
}

void Audit::require_real() const {
  only_errors([&] {
    if (!on_meta.empty()) {
      refuse("audit.on_meta", on_meta, "without memory and not excluded");
    }
    if (!unaccounted.empty()) refuse("audit.unaccounted", unaccounted, "without a known origin");
  });
}

std::string Audit::text() const {
  std::string text;
  if (ok()) {
    text = fmt::format("All {} accounted for", counted(provenance.size(), "tensor"));
    if (!not_held.empty()) {
      text += fmt::format(", {} of them intentionally without a value in memory", not_held.size());
    }
  } else {
    text = fmt::format("NOT accounted for: {} of {}", on_meta.size() + unaccounted.size(),
                       counted(provenance.size(), "tensor"));
    if (!on_meta.empty()) {
      text += fmt::format("; {} on meta: {}", on_meta.size(),
                          name_list(on_meta, on_meta.size(), names_shown_max));
    }
    if (!unaccounted.empty()) {
      text += fmt::format("; {} unaccounted: {}", unaccounted.size(),
                          name_list(unaccounted, unaccounted.size(), names_shown_max));
    }
  }
  text += ".\n";
  std::map<Origin, std::size_t> counts;
  for (const Provenance& item : provenance) ++counts[item.origin];
  for (const auto& [origin, count] : counts) {
    text += fmt::format("  {:<12} {}\n", name(origin), count);
  }
  return text;
}

}  // namespace loadstone
