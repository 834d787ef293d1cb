// Writes the page. The verdict, the findings and the folded table are markup and need no script.
// page.js draws the other parts from page_data().
#include "loadstone/page.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "base/only_errors.h"
#include "base/text.h"
#include "loadstone/execute.h"
#include "page/assets.h"
#include "page/page_data.h"
#include "plan/catalog_of.h"
#include "plan/fold.h"
#include "plan/verdict.h"

namespace loadstone {

namespace {

// Maximum rows of the static table. The script's table has all rows.
constexpr std::size_t folded_rows_max = 2000;

// Escapes markup, because names come from untrusted files.
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

// Adds the sentence on the possible or completed load.
void add_verdict(std::string& page, const Plan& plan, const PageOptions& options) {
  std::string loaded;
  if (options.loaded) {
    loaded = fmt::format("Loaded: {} in {:.3g} s", human_bytes(options.loaded->bytes_read),
                         options.loaded->seconds);
  }
  const Verdict verdict = verdict_of(plan, loaded);
  const std::string_view kind = verdict.severity == Severity::info ? "ok" : name(verdict.severity);
  page += fmt::format(
      "<section class=\"verdict {}\" role=\"status\"><p class=\"first\">{}</p><p>{}</p>"
      "</section>\n",
      kind, escaped(verdict.first), escaped(verdict.next));
}

void add_fact(std::string& page, std::string_view term, std::string_view text) {
  page += fmt::format("<div><dt>{}</dt><dd>{}</dd></div>\n", escaped(term), escaped(text));
}

void add_facts(std::string& page, const Plan& plan, const PageOptions& options) {
  page += "<dl class=\"facts\">\n";
  add_fact(page, "targets", counts_text(plan));
  add_fact(page, "to read", human_bytes(plan.bytes_to_read));
  if (plan.bytes_to_write > 0) {
    add_fact(page, "to write to " + plan.offload_folder, human_bytes(plan.bytes_to_write));
  }
  const std::map<std::string, std::uint64_t> limits(options.max_memory.begin(),
                                                    options.max_memory.end());
  for (const auto& [device, bytes] : peaks_of(plan, options)) {
    std::string text = human_bytes(bytes);
    if (const auto limit = limits.find(device); limit != limits.end()) {
      text += " of " + human_bytes(limit->second);
    }
    add_fact(page, "planned peak on " + device, text);
  }
  if (const auto& loaded = options.loaded; loaded) {
    if (loaded->seconds > 0) {
      const double speed = static_cast<double>(loaded->bytes_read) / loaded->seconds;
      add_fact(page, "speed", human_bytes(static_cast<std::uint64_t>(speed)) + "/s");
    }
    add_fact(page, "load used: staging", human_bytes(loaded->staging_bytes_peak));
    if (loaded->process_bytes_peak > 0) {
      add_fact(page, "process used: peak", human_bytes(loaded->process_bytes_peak));
    }
  }
  page += "</dl>\n";
}

void add_group(std::string& page, std::span<const Finding> group) {
  const Finding& first = group.front();
  page += fmt::format(
      "<details class=\"finding\"{}><summary><span class=\"badge {}\">{}</span> {} "
      "<code>{}</code></summary><ul>\n",
      first.severity == Severity::error ? " open" : "", name(first.severity), name(first.severity),
      group.size(), escaped(first.code));
  for (std::size_t f = 0; f < std::min(group.size(), findings_shown_max); ++f) {
    page += "<li>" + escaped(group[f].message);
    if (!group[f].suggestion.empty()) {
      page += "<br><code class=\"suggestion\">" + escaped(group[f].suggestion) + "</code>";
    }
    page += "</li>\n";
  }
  if (group.size() > findings_shown_max) {
    page += fmt::format("<li>{} more</li>\n", group.size() - findings_shown_max);
  }
  page += "</ul></details>\n";
}

void add_findings(std::string& page, const Plan& plan) {
  if (plan.findings.empty()) return;
  page += "<h2>Findings</h2>\n";
  for (const auto group : finding_groups(plan.findings)) add_group(page, group);
}

constexpr std::string_view drawn = R"(<div class="plain">
<h2 id="memory-title">Memory, as the shards are read</h2>
<div class="scroll">
<svg id="memory" class="chart" role="img" aria-labelledby="memory-title"></svg></div>
<ul id="memory-legend" class="legend"></ul>
<p class="soft">Each target counts from when its first byte is read. Dotted: the peak that the plan
promises, including bytes in flight.</p>
@speed@
<h2>Where the bytes are</h2>
<div class="bar"><label>by <select id="map-by"><option value="module">module</option>
<option value="device">device</option><option value="dtype">dtype</option></select></label>
<span id="map-path"></span></div>
<div id="map" class="map"></div>
</div>
<h2>Targets</h2>
<div class="targets plain">
<div class="bar"><input id="search" type="search" placeholder="search names"
 aria-label="search names">
<select id="only-device" aria-label="device"><option value="">all devices</option></select>
<select id="only-origin" aria-label="origin"><option value="">all origins</option></select>
<select id="only-dtype" aria-label="dtype"><option value="">all dtypes</option></select>
<select id="only-kind" aria-label="kind"><option value="">all kinds</option></select>
<span id="shown" class="soft" role="status"></span></div>
<div id="grid" class="table" role="table" aria-label="targets">
<div id="head" class="row head" role="row"></div>
<div id="rows" class="body" tabindex="0" role="rowgroup"
 aria-label="rows: arrow keys choose one"></div></div>
<div id="recipe" class="recipe" aria-live="polite">
<span class="soft">Choose a row to see how its value is made.</span></div>
</div>
)";

constexpr std::string_view speed_chart = R"(<h2 id="speed-title">Speed</h2>
<div class="scroll">
<svg id="speed" class="chart" role="img" aria-labelledby="speed-title"></svg></div>)";

void add_drawn(std::string& page, bool has_speed) {
  constexpr std::string_view mark = "@speed@";
  const std::size_t place = drawn.find(mark);
  page += drawn.substr(0, place);
  if (has_speed) page += speed_chart;
  page += drawn.substr(place + mark.size());
}

// Adds the table for printing, and for readers without scripts.
void add_folded(std::string& page, const Plan& plan) {
  page +=
      "<table class=\"folded\"><tr><th>target</th><th></th><th>kind</th><th>shape</th>"
      "<th>dtype</th><th>device</th><th>bytes</th><th>origin</th><th>from</th></tr>\n";
  const std::vector<PlanRow> rows = fold_targets(plan);
  for (std::size_t r = 0; r < std::min(rows.size(), folded_rows_max); ++r) {
    const PlanRow& row = rows[r];
    page += fmt::format(
        "<tr><td class=\"name\">{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td>"
        "<td class=\"number\">{}</td><td>{}</td><td class=\"name\">{}</td></tr>\n",
        escaped(row.name), row.count > 1 ? fmt::format("x{}", row.count) : "", escaped(row.kind),
        escaped(row.shape), escaped(row.dtype), escaped(row.device), human_bytes(row.bytes),
        escaped(row.origin), escaped(row.from));
  }
  if (rows.size() > folded_rows_max) {
    page +=
        fmt::format("<tr><td>{}</td></tr>\n", counted(rows.size() - folded_rows_max, "more row"));
  }
  page += "</table>\n";
}

std::string page_of(const Plan& plan, const PageOptions& options) {
  const std::string title = options.model.empty() ? "Load plan" : "Load plan of " + options.model;
  std::string page = fmt::format(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
      "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n"
      "<title>{}</title>\n<style>\n{}</style></head><body>\n<h1>{}</h1>\n",
      escaped(title), page_style, escaped(title));
  const std::vector<Shard>& shards = catalog_of(plan).shards();
  page += fmt::format("<p class=\"soft\">{}, {}</p>\n", escaped(plan.catalog->shown_path()),
                      counted(shards.size(), "shard"));
  add_verdict(page, plan, options);
  add_facts(page, plan, options);
  add_findings(page, plan);
  add_drawn(page, options.loaded && options.loaded->progress.size() > 1);
  add_folded(page, plan);
  page += "<script type=\"application/json\" id=\"data\">";
  page += page_data(plan, options);
  page += "</script>\n<script>\n";
  page += page_script;
  return page + "</script></body></html>\n";
}

}  // namespace

LoadFigures figures_of(const Report& report) noexcept {
  return {.seconds = report.seconds,
          .bytes_read = report.bytes_read,
          .staging_bytes_peak = report.staging_bytes_peak};
}

std::string to_html(const Plan& plan, const PageOptions& options) {
  return only_errors([&] { return page_of(plan, options); });
}

}  // namespace loadstone
