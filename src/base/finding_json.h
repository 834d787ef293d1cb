// Writes findings and their context to JSON documents and tables.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "base/json_fields.h"
#include "base/json_writer.h"
#include "loadstone/finding.h"

namespace loadstone {

// Visits all fields, including empty ones.
template <typename Visitor>
void visit_fields(Visitor& visitor, Like<Finding> auto& finding) {
  visitor.member("severity", finding.severity);
  visitor.member("code", finding.code);
  visitor.member("target", finding.target);
  visitor.member("sources", finding.sources);
  visitor.member("message", finding.message);
  visitor.member("suggestion", finding.suggestion);
  visitor.member("found", finding.found);
  visitor.member("expected", finding.expected);
}

// The function that combines the figures of several reports. A bool is true if it is true in all
// reports.
enum class Joined : std::uint8_t { sum, largest };

// Visits the figures of a report in the order of its JSON: visit(name, member, joined).
template <typename Report, typename Visit>
void visit_numbers(Visit visit) {
  visit("seconds", &Report::seconds, Joined::sum);
  visit("sync_seconds", &Report::sync_seconds, Joined::sum);
  visit("bytes_read", &Report::bytes_read, Joined::sum);
  visit("bytes_written", &Report::bytes_written, Joined::sum);
  visit("bytes_read_ahead", &Report::bytes_read_ahead, Joined::sum);
  if constexpr (requires(Report report) { report.outputs; }) {  // a report of a conversion
    visit("bytes_kept", &Report::bytes_kept, Joined::sum);
    visit("bytes_checked", &Report::bytes_checked, Joined::sum);
    visit("peak_bytes", &Report::peak_bytes, Joined::largest);
  } else {
    visit("staging_bytes_peak", &Report::staging_bytes_peak, Joined::largest);
    visit("readers", &Report::readers, Joined::largest);
    visit("is_interleaved", &Report::is_interleaved, Joined::largest);
  }
}

template <typename Report>
void join_numbers(Report& report, const Report& more) {
  visit_numbers<Report>([&](const char*, auto member, Joined how) {
    auto& number = report.*member;
    if constexpr (std::is_same_v<decltype(number), bool&>) {
      number = number && more.*member;
    } else {
      number = how == Joined::sum ? number + more.*member : std::max(number, more.*member);
    }
  });
}

// Writes the findings and figures of a report.
template <typename Report>
void write_work(JsonWriter& json, const Report& report) {
  json.member("findings", report.findings);
  visit_numbers<Report>(
      [&](const char* name, auto member, Joined) { json.member(name, report.*member); });
}

// Returns a finding's message, with its suggestion in parentheses.
[[nodiscard]] std::string advised_message(const Finding& finding);

// The most findings of one code, or differences of one kind, that a text lists.
inline constexpr std::size_t lines_alike_max = 20;

// Returns one readable line per finding: "  warning: MESSAGE (SUGGESTION) [CODE]", up to
// lines_alike_max of a code.
[[nodiscard]] std::string finding_lines(const std::vector<Finding>& findings);

}  // namespace loadstone
