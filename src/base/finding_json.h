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

// Members that reports of work share: findings, seconds and bytes.
template <typename Report>
void write_work(JsonWriter& json, const Report& report) {
  write_findings(json, report.findings);
  json.member("seconds", report.seconds);
  json.member("sync_seconds", report.sync_seconds);
  json.member("bytes_read", report.bytes_read);
  json.member("bytes_written", report.bytes_written);
}

// For people, a line each: "  warning: MESSAGE [CODE]".
[[nodiscard]] std::string finding_lines(const std::vector<Finding>& findings);

}  // namespace loadstone
