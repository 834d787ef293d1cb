#include "formats/file_header.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <span>
#include <tuple>

#include "base/digest.h"
#include "base/text.h"
#include "loadstone/storage.h"

namespace loadstone {

void note_reads(const ByteSource& source, Shard& shard) {
  shard.reads_at_once = source.reads_at_once();
  shard.is_on_network = source.is_on_network();
}

void refuse(const std::string& path, HeaderProblem problem, std::string_view culprit) {
  throw Error(problem.code, std::move(problem.message),
              {.path = path,
               .tensor = std::string(culprit),
               .field = std::string(problem.field),
               .found = std::move(problem.found),
               .expected = std::move(problem.expected),
               .byte_offset = problem.byte_offset});
}

std::string header_digest(ByteSource& source, const Shard& shard) {
  Digest digest;
  std::vector<std::byte> buffer(64 << 10);
  const auto add = [&](std::uint64_t begin, std::uint64_t end) {
    for (std::uint64_t at = begin; at < end; at += buffer.size()) {
      const auto piece = std::span(buffer).first(std::min<std::uint64_t>(buffer.size(), end - at));
      source.read(at, piece);
      digest.update(piece);
    }
  };
  add(0, shard.data_begin);
  if (shard.tail_begin != 0) add(shard.tail_begin, shard.identity.bytes);
  return digest.hex();
}

std::string bytes_text(std::uint64_t bytes) { return counted(bytes, "byte"); }

// Sorts hashes, because a set of 125,000 strings would take as long as the rest of the reading.
std::optional<std::size_t> second_of_a_name(const std::vector<TensorInfo>& tensors) {
  struct Row {
    std::size_t hash;
    std::size_t tensor;
  };
  std::vector<Row> rows(tensors.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i] = {std::hash<std::string>{}(tensors[i].name), i};
  }
  std::ranges::sort(rows, [&](const Row& a, const Row& b) {
    if (a.hash != b.hash) return a.hash < b.hash;
    return std::tie(tensors[a.tensor].name, a.tensor) < std::tie(tensors[b.tensor].name, b.tensor);
  });
  for (std::size_t i = 1; i < rows.size(); ++i) {
    const bool same_hash = rows[i].hash == rows[i - 1].hash;
    if (same_hash && tensors[rows[i].tensor].name == tensors[rows[i - 1].tensor].name) {
      return rows[i].tensor;
    }
  }
  return std::nullopt;
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
    finding.message = fmt::format("{}: the same warning occurs {}", printable(path_, 400),
                                  counted(counts_[code] - per_code_max, "more time"));
    findings_.push_back(std::move(finding));
  }
  counts_.clear();
  return std::move(findings_);
}

}  // namespace loadstone
