#include "formats/file_header.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"

namespace loadstone {

void refuse(const std::string& path, HeaderProblem problem) {
  Where where;
  where.path = path;
  where.tensor = problem.culprit;
  where.field = problem.field;
  where.found = std::move(problem.found);
  where.expected = std::move(problem.expected);
  where.byte_offset = problem.byte_offset;
  throw Error(problem.code, std::move(problem.message), std::move(where));
}

std::string bytes_text(std::uint64_t bytes) {
  return fmt::format("{} byte{}", bytes, bytes == 1 ? "" : "s");
}

void Warnings::add(std::string code, std::string_view culprit, std::string_view field,
                   std::string_view message, std::string found, std::string expected) {
  if (++counts_[code] > per_code_max) return;
  Finding finding;
  finding.severity = Severity::warning;
  finding.code = std::move(code);
  finding.message = printable(path_, 400) + ": ";
  if (field != "file") finding.message += fmt::format("'{}': ", printable(culprit));
  finding.message += fmt::format("{}: {}", field, printable(message, 1000));
  if (field != "file") finding.sources.emplace_back(culprit);
  finding.found = std::move(found);
  finding.expected = std::move(expected);
  if (!finding.found.empty()) finding.message += "; found " + printable(finding.found);
  if (!finding.expected.empty()) finding.message += "; expected " + printable(finding.expected);
  findings_.push_back(std::move(finding));
}

std::vector<Finding> Warnings::take() {
  std::vector<std::string> codes;
  for (const auto& [code, count] : counts_) {
    if (count > per_code_max) codes.push_back(code);
  }
  std::ranges::sort(codes);
  for (const std::string& code : codes) {
    Finding finding;
    finding.severity = Severity::warning;
    finding.code = code;
    finding.message = fmt::format("{}: the same {} more times", printable(path_, 400),
                                  counts_[code] - per_code_max);
    findings_.push_back(std::move(finding));
  }
  counts_.clear();
  return std::move(findings_);
}

}  // namespace loadstone
