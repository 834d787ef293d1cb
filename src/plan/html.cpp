// A plan as one page that needs nothing else.
#include <fmt/format.h>

#include "base/only_errors.h"
#include "base/text.h"
#include "loadstone/plan.h"
#include "plan/fold.h"

namespace loadstone {

namespace {

constexpr std::string_view head = R"(<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Load plan</title><style>
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; background: #fff }
table { border-collapse: collapse; margin: 1em 0 }
th, td { text-align: left; vertical-align: top }
th, td { padding: .2em .8em .2em 0; border-bottom: 1px solid #ddd }
td.number { text-align: right } td.name { font-family: monospace; overflow-wrap: anywhere }
.error { color: #b00020; font-weight: 600 } .warning { color: #9a6700 } .info { color: #57606a }
</style></head><body><h1>Load plan</h1>
)";

// Names come from files: nothing of them may become markup.
std::string escaped(std::string_view text) {
  std::string out;
  for (const char character : printable(text, 1000)) {
    switch (character) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += character;
    }
  }
  return out;
}

void add_findings(std::string& page, const Plan& plan) {
  if (plan.findings.empty()) return;
  page += "<h2>Findings</h2><table><tr><th></th><th>code</th><th>message</th></tr>\n";
  for (const Finding& finding : plan.findings) {
    page += fmt::format("<tr><td class=\"{0}\">{0}</td><td>{1}</td><td>{2}", name(finding.severity),
                        escaped(finding.code), escaped(finding.message));
    if (!finding.suggestion.empty()) page += "<br><i>" + escaped(finding.suggestion) + "</i>";
    page += "</td></tr>\n";
  }
  page += "</table>\n";
}

}  // namespace

static std::string page_of(const Plan& plan) {
  std::string page(head);
  page += fmt::format("<p>{}<br>{} to read", escaped(counts_text(plan)),
                      human_bytes(plan.bytes_to_read));
  if (plan.bytes_to_write > 0) {
    page += fmt::format(", {} to write to {}", human_bytes(plan.bytes_to_write),
                        escaped(plan.offload_folder));
  }
  page += "<br>Peak:";
  for (const auto& [device, bytes] : plan.peak_bytes) {
    page += fmt::format(" {} on {};", human_bytes(bytes), escaped(device));
  }
  page += "</p>\n";
  add_findings(page, plan);
  page +=
      "<h2>Targets</h2><table><tr><th>target</th><th></th><th>kind</th><th>shape</th>"
      "<th>dtype</th><th>device</th><th>bytes</th><th>origin</th><th>from</th></tr>\n";
  for (const PlanRow& row : fold_targets(plan)) {
    page += fmt::format(
        "<tr><td class=\"name\">{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td>"
        "<td class=\"number\">{}</td><td>{}</td><td class=\"name\">{}</td></tr>\n",
        escaped(row.name), row.count > 1 ? fmt::format("x{}", row.count) : "", escaped(row.kind),
        escaped(row.shape), escaped(row.dtype), escaped(row.device), human_bytes(row.bytes),
        escaped(row.origin), escaped(row.from));
  }
  return page + "</table></body></html>\n";
}

std::string to_html(const Plan& plan) {
  return only_errors([&] { return page_of(plan); });
}

}  // namespace loadstone
