// A plan as text that a person reads on a terminal.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>

#include "base/only_errors.h"
#include "base/text.h"
#include "loadstone/plan.h"
#include "plan/fold.h"

namespace loadstone {

namespace {

constexpr std::size_t name_width_max = 72;

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

void add_rows(std::string& text, const Plan& plan) {
  std::vector<Cells> rows = {
      Cells{"target", "shape", "dtype", "device", "bytes", "kind", "origin"}};
  for (const PlanRow& row : fold_targets(plan)) rows.push_back(cells_of(row));
  std::array<std::size_t, 7> widths = {};
  for (std::size_t i = 0; i < widths.size(); ++i) {
    for (auto cells = rows.begin() + 1; cells != rows.end(); ++cells) {
      widths[i] = std::max(widths[i], std::min((*cells)[i].size(), name_width_max));
    }
    // A column that says nothing has no heading either.
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
}

void add_findings(std::string& text, const std::vector<Finding>& findings) {
  std::map<std::pair<Severity, std::string>, std::size_t> counts;
  for (const Finding& finding : findings) {
    const std::size_t shown = ++counts[{finding.severity, finding.code}];
    if (shown > findings_shown_max) continue;
    text += fmt::format("{:<7}  {}  {}\n", name(finding.severity), finding.code,
                        printable(finding.message, 1000));
    if (!finding.suggestion.empty()) {
      text += fmt::format("         {}\n", printable(finding.suggestion, 1000));
    }
  }
  for (const auto& [which, count] : counts) {
    if (count <= findings_shown_max) continue;
    text += fmt::format("{:<7}  {}  {} more of these\n", name(which.first), which.second,
                        count - findings_shown_max);
  }
}

}  // namespace

static std::string table_of(const Plan& plan) {
  std::string text;
  add_rows(text, plan);
  text += '\n';
  if (!plan.findings.empty()) {
    add_findings(text, plan.findings);
    text += '\n';
  }
  text += "plan     " + counts_text(plan) + '\n';
  text += fmt::format("bytes    {} to read", human_bytes(plan.bytes_to_read));
  if (plan.bytes_to_write > 0) {
    text += fmt::format(", {} to write to {}", human_bytes(plan.bytes_to_write),
                        printable(plan.offload_folder));
  }
  text += "\npeak     ";
  const char* separator = "";
  for (const auto& [device, bytes] : plan.peak_bytes) {
    text += fmt::format("{}{} on {}", separator, human_bytes(bytes), device);
    separator = ", ";
  }
  const auto counted_as = [&](Severity severity) {
    const auto count = std::ranges::count(plan.findings, severity, &Finding::severity);
    return counted(static_cast<std::uint64_t>(count), name(severity));
  };
  return text + fmt::format("\nfound    {}, {}{}\n", counted_as(Severity::error),
                            counted_as(Severity::warning),
                            plan.ok() ? "" : ": this plan cannot be carried out");
}

std::string to_table(const Plan& plan) {
  return only_errors([&] { return table_of(plan); });
}

}  // namespace loadstone
