#include "base/finding_json.h"

#include <fmt/format.h>

#include <string>

#include "base/text.h"

namespace loadstone {

namespace {

Finding read_finding(const JsonReader& reader, JsonReader::Element value, const JsonPlace& place) {
  JsonObject fields(reader, value, place);
  const auto text = [&](std::string_view field) {
    return std::string(reader.string(fields.required(field), fields.at(field)));
  };
  Finding finding;
  finding.severity = reader.named<Severity>(fields.required("severity"), fields.at("severity"));
  finding.code = text("code");
  finding.target = text("target");
  const JsonPlace sources = fields.at("sources");
  for (const auto source : reader.array(fields.required("sources"), sources)) {
    finding.sources.emplace_back(reader.string(source, {&sources, {}, finding.sources.size()}));
  }
  finding.message = text("message");
  finding.suggestion = text("suggestion");
  finding.found = text("found");
  finding.expected = text("expected");
  fields.done();
  return finding;
}

}  // namespace

void write_findings(JsonWriter& json, const std::vector<Finding>& findings, std::string_view key) {
  json.key(key);
  json.begin_array();
  for (const Finding& finding : findings) {
    json.begin_object();
    json.member("severity", name(finding.severity));
    json.member("code", finding.code);
    json.member("target", finding.target);
    json.member("sources", finding.sources);
    json.member("message", finding.message);
    json.member("suggestion", finding.suggestion);
    json.member("found", finding.found);
    json.member("expected", finding.expected);
    json.end_object();
  }
  json.end_array();
}

std::string finding_lines(const std::vector<Finding>& findings) {
  std::string text;
  for (const Finding& finding : findings) {
    text += fmt::format("  {}: {} [{}]\n", name(finding.severity), printable(finding.message, 2000),
                        finding.code);
  }
  return text;
}

std::vector<Finding> read_findings(const JsonReader& reader, JsonReader::Element value,
                                   const JsonPlace& place) {
  std::vector<Finding> findings;
  for (const auto item : reader.array(value, place)) {
    findings.push_back(read_finding(reader, item, {&place, {}, findings.size()}));
  }
  return findings;
}

}  // namespace loadstone
