// Findings in JSON documents and tables, and what stands beside them there.
#pragma once

#include <vector>

#include "base/json_fields.h"
#include "base/json_writer.h"
#include "loadstone/finding.h"

namespace loadstone {

// A member: an array of objects with all fields, also the empty ones.
void write_findings(JsonWriter& json, const std::vector<Finding>& findings,
                    std::string_view key = "findings");
[[nodiscard]] std::vector<Finding> read_findings(const JsonReader& reader,
                                                 JsonReader::Element value, const JsonPlace& place);

// Numbers that reports of work share, for JSON and for Python; those of several reports sum up.
template <typename Report, typename Visit>
void visit_work(Visit visit) {
  visit("seconds", &Report::seconds);
  visit("sync_seconds", &Report::sync_seconds);
  visit("bytes_read", &Report::bytes_read);
  visit("bytes_written", &Report::bytes_written);
  visit("bytes_read_ahead", &Report::bytes_read_ahead);
}

// Findings, and these numbers.
template <typename Report>
void write_work(JsonWriter& json, const Report& report) {
  write_findings(json, report.findings);
  visit_work<Report>([&](const char* name, auto member) { json.member(name, report.*member); });
}

// For people, a line each: "  warning: MESSAGE [CODE]".
[[nodiscard]] std::string finding_lines(const std::vector<Finding>& findings);

}  // namespace loadstone
