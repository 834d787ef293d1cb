// Findings in JSON documents and tables, and what stands beside them there.
#pragma once

#include <string>
#include <vector>

#include "base/json_fields.h"
#include "base/json_writer.h"
#include "loadstone/finding.h"

namespace loadstone {

// All fields, also the empty ones.
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
  json.member("findings", report.findings);
  visit_work<Report>([&](const char* name, auto member) { json.member(name, report.*member); });
}

// For people, a line each: "  warning: MESSAGE [CODE]".
[[nodiscard]] std::string finding_lines(const std::vector<Finding>& findings);

}  // namespace loadstone
