#include "plan/verdict.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>

#include "base/checked.h"
#include "base/only_errors.h"
#include "base/text.h"
#include "loadstone/error.h"
#include "plan/fold.h"

namespace loadstone {

namespace {

constexpr std::size_t name_width_max = 72;
constexpr std::size_t rows_on_a_screen = 16;

using Cells = std::array<std::string, 7>;

Cells cells_of(const PlanRow& row) {
  std::string name = printable(row.name, 120);
  if (row.count > 1) name += fmt::format("  x{}", row.count);
  std::string origin = printable(row.origin, 120);
  if (!row.from.empty())
    origin += (row.origin == "tie" ? " of " : " from ") + printable(row.from, 120);
  const bool has_bytes = row.bytes > 0;
  const std::string kind = row.kind == "parameter" ? "" : row.kind;
  return {name, row.shape, row.dtype, row.device, has_bytes ? human_bytes(row.bytes) : "",
          kind, origin};
}

// Appends the table of targets. Returns its number of rows.
std::size_t add_rows(std::string& text, const Plan& plan) {
  std::vector<Cells> rows = {
      Cells{"target", "shape", "dtype", "device", "bytes", "kind", "origin"}};
  for (const PlanRow& row : fold_targets(plan)) rows.push_back(cells_of(row));
  std::array<std::size_t, 7> widths = {};
  for (std::size_t i = 0; i < widths.size(); ++i) {
    for (auto cells = rows.begin() + 1; cells != rows.end(); ++cells) {
      widths[i] = std::max(widths[i], std::min((*cells)[i].size(), name_width_max));
    }
    // The heading of an empty column is omitted too.
    if (widths[i] > 0) widths[i] = std::max(widths[i], rows.front()[i].size());
  }
  for (const Cells& cells : rows) {
    std::string line;
    for (std::size_t i = 0; i < cells.size(); ++i) {
      if (widths[i] == 0) continue;
      if (i > 0) line += "  ";
      const bool is_number = i == 4;
      line += is_number ? fmt::format("{:>{}}", cells[i], widths[i])
                        : fmt::format("{:<{}}", cells[i], widths[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return rows.size();
}

void add_findings(std::string& text, const std::vector<Finding>& findings, const TextStyle& style) {
  for (const auto group : finding_groups(findings)) {
    const Finding& first = group.front();
    const CodeInfo* const info = find_code(first.code);
    const std::string count = counted(group.size(), name(first.severity));
    text += first.severity == Severity::error     ? style.error(count)
            : first.severity == Severity::warning ? style.warning(count)
                                                  : style.strong(count);
    text += "  " + style.strong(first.code);
    if (info != nullptr) text += fmt::format("  {}", info->meaning);
    text += '\n';
    const auto shown = group.first(std::min(group.size(), findings_shown_max));
    for (auto each = shown.begin(); each != shown.end(); ++each) {
      text += fmt::format("  {}\n", printable(each->message, 1000));
      // Equal advice follows the last message that it is for.
      const bool is_last = each + 1 == shown.end() || (each + 1)->suggestion != each->suggestion;
      if (is_last && !each->suggestion.empty()) {
        text += fmt::format("      {}\n", printable(each->suggestion, 1000));
      }
    }
    if (group.size() > findings_shown_max) {
      text += fmt::format("  {} more of these\n", group.size() - findings_shown_max);
    }
    text += '\n';
  }
}

struct Placed {
  std::uint64_t tensors = 0;
  std::uint64_t bytes = 0;

  void add(std::uint64_t more) {
    ++tensors;
    bytes = saturating_add(bytes, more);
  }
  [[nodiscard]] std::string text() const {
    return fmt::format("{} ({})", counted(tensors, "tensor"), human_bytes(bytes));
  }
};

// Appends the tensors and bytes of each device, unless all tensors are on the CPU.
void add_placement(std::string& text, const Plan& plan) {
  std::map<std::string, Placed> devices;
  Placed kept;
  for (const PlannedTarget& target : plan.targets) {
    const Origin origin = target.recipe.origin;
    if (origin == Origin::tie || origin == Origin::excluded) continue;
    devices[target.device].add(target.byte_count());
    if (target.delivery == Delivery::disk_keep) kept.add(target.byte_count());
  }
  if (devices.empty() || (devices.size() == 1 && devices.contains("cpu"))) return;
  const char* separator = "placed   ";
  for (const auto& [device, placed] : devices) {
    text += fmt::format("{}{} on {}", separator, placed.text(), printable(device));
    separator = ", ";
  }
  if (kept.tensors > 0) text += fmt::format("; on disk, {} stay in their shards", kept.text());
  text += '\n';
}

void add_figures(std::string& text, const Plan& plan, std::optional<std::uint64_t> free_bytes) {
  text += "plan     " + counts_text(plan) + '\n';
  text += fmt::format("bytes    {} to read", human_bytes(plan.bytes_to_read));
  if (plan.bytes_to_write > 0) {
    text += fmt::format(", {} to write to {}", human_bytes(plan.bytes_to_write),
                        printable(plan.offload_folder));
  }
  text += "\nmemory   planned: peak ";
  const char* separator = "";
  for (const auto& [device, bytes] : plan.peak_bytes) {
    text += fmt::format("{}{} on {}", separator, human_bytes(bytes), printable(device));
    separator = ", ";
  }
  if (plan.peak_bytes.empty()) text += "nothing";
  if (free_bytes) text += fmt::format("; {} are free on this machine", human_bytes(*free_bytes));
  text += '\n';
  add_placement(text, plan);
}

}  // namespace

Verdict verdict_of(const Plan& plan, const std::string& loaded) {
  const auto count_of = [&](Severity severity) {
    return static_cast<std::uint64_t>(
        std::ranges::count(plan.findings, severity, &Finding::severity));
  };
  const std::uint64_t errors = count_of(Severity::error);
  const std::uint64_t warnings = count_of(Severity::warning);
  if (errors > 0) {
    return {Severity::error, counted(errors, "error") + ": this plan cannot be executed",
            "Nothing was read. Fix the errors below, then plan again."};
  }
  const bool can_begin =
      std::ranges::count(plan.findings, "plan.device_absent", &Finding::code) == 0;
  Verdict verdict = {Severity::info, "OK: every target has a known origin",
                     can_begin ? "The load can begin."
                               : "The load cannot begin on this machine, which lacks devices."};
  if (!loaded.empty()) {
    verdict.first = loaded;
    verdict.next = proved_text(plan);
  }
  if (warnings > 0) {
    verdict.severity = Severity::warning;
    verdict.next = counted(warnings, "warning") + " below. " + verdict.next;
  }
  return verdict;
}

std::string proved_text(const Plan& plan) {
  const auto excluded = std::ranges::count_if(plan.targets, [](const PlannedTarget& target) {
    return target.recipe.origin == Origin::excluded;
  });
  if (excluded == 0) return "Every target has a value and a known origin.";
  return "Every target has a value and a known origin, except " +
         counted(static_cast<std::uint64_t>(excluded), "target") +
         " intentionally without a value.";
}

std::vector<std::span<const Finding>> finding_groups(const std::vector<Finding>& findings) {
  std::vector<std::span<const Finding>> groups;
  for (auto begin = findings.begin(); begin != findings.end();) {
    const auto end = std::find_if(begin, findings.end(), [&](const Finding& each) {
      return each.code != begin->code || each.severity != begin->severity;
    });
    groups.emplace_back(begin, end);
    begin = end;
  }
  return groups;
}

std::string verdict_text(const Verdict& verdict, const TextStyle& style) {
  std::string text;
  switch (verdict.severity) {
    case Severity::error:
      text = style.error(verdict.first);
      break;
    case Severity::warning:
      text = style.warning(verdict.first);
      break;
    case Severity::info:
      text = style.ok(verdict.first);
      break;
  }
  return text + '\n' + verdict.next + '\n';
}

std::string plan_text(const Plan& plan, const TextStyle& style,
                      std::optional<std::uint64_t> free_bytes) {
  const std::string verdict = verdict_text(verdict_of(plan), style);
  std::string text = verdict + '\n';
  add_figures(text, plan, free_bytes);
  text += '\n';
  add_findings(text, plan.findings, style);
  const std::size_t rows = add_rows(text, plan);
  // The verdict is repeated after a long table, because its first copy has scrolled off the screen.
  if (rows > rows_on_a_screen) text += '\n' + verdict.substr(0, verdict.find('\n') + 1);
  return text;
}

std::string to_table(const Plan& plan) {
  return only_errors([&] { return plan_text(plan, {}); });
}

}  // namespace loadstone
