#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/finding_json.h"
#include "base/json_writer.h"
#include "base/named.h"
#include "base/only_errors.h"
#include "base/text.h"
#include "loadstone/verify.h"

namespace loadstone {

std::string_view name(DifferenceKind kind) noexcept {
  return name_among({"missing", "unexpected", "encoding", "shape", "bytes", "values"}, kind);
}

static void visit_fields(JsonWriter& json, const Difference& difference) {
  json.member("name", difference.name);
  json.member("kind", difference.kind);
  json.member("found", difference.found);
  json.member("expected", difference.expected);
}

static void visit_fields(JsonWriter& json, const NotFinite& tensor) {
  json.member("name", tensor.name);
  json.member("nan", tensor.nan);
  json.member("infinite", tensor.infinite);
}

static void visit_fields(JsonWriter& json, const QuantizationError& error) {
  json.member("name", error.name);
  json.member("encoding", error.encoding);
  json.member("relative_error", error.relative);
}

static void visit_fields(JsonWriter& json, const Widened& tensor) {
  json.member("name", tensor.name);
  json.member("found", tensor.found);
  json.member("expected", tensor.expected);
}

// Returns the verdict on two checkpoints without differences.
static std::string verdict(const VerifyReport& report) {
  if (report.quantized.empty() && report.widened.empty() && report.rounded.empty()) return "equal";
  double worst = 0;
  bool is_rounded = !report.rounded.empty();
  for (const QuantizationError& each : report.quantized) {
    if (!(each.relative <= worst)) worst = each.relative;  // also if it is NaN
    is_rounded |= each.encoding == name(Dtype::bf16) || each.encoding == name(Dtype::f16);
  }
  if (worst != 0) return fmt::format("a relative error of at most {:.3g}", worst);
  return is_rounded ? "equal up to rounding to the new dtype" : "equal as real numbers";
}

static void visit_fields(JsonWriter& json, const VerifyReport& report) {
  json.member("ok", report.ok());
  if (report.is_comparison && report.ok()) json.member("verdict", verdict(report));
  json.member("differences", report.differences);
  json.member("not_finite", report.not_finite);
  json.member("findings", report.findings);
  json.member("quantized", report.quantized);
  json.optional("sampled", report.sampled);
  json.member("widened", report.widened);
  json.member("rounded", report.rounded);
  json.member("bytes_read", report.bytes_read);
  if (json.optional("files", report.files)) json.member("files_equal", report.files_equal);
}

std::string to_json(const VerifyReport& report) {
  return only_errors([&] { return json_text(report, 2); });
}

namespace {

// Returns one line for each difference, up to lines_alike_max of each kind. Names all files.
std::string differences_text(const std::vector<Difference>& differences) {
  // By kind, and by whether they are about a file.
  std::map<std::pair<DifferenceKind, bool>, std::vector<std::string>> names;
  std::string text;
  for (const Difference& each : differences) {
    std::vector<std::string>& alike = names[{each.kind, each.is_file}];
    alike.push_back(each.name);
    if (alike.size() > lines_alike_max) continue;
    text += fmt::format("  {:<10} '{}': found {}; expected {}\n", name(each.kind),
                        printable(each.name), printable(each.found), printable(each.expected));
  }
  for (const auto& [group, alike] : names) {
    if (alike.size() <= lines_alike_max) continue;
    const auto more = std::span(alike).subspan(lines_alike_max);
    const auto& [kind, are_files] = group;
    text += fmt::format("  {:<10} {} more{}\n", name(kind), more.size(),
                        are_files ? ": " + name_list(more, more.size(), more.size()) : "");
  }
  return text;
}

// Returns one line for each encoding.
std::string quantized_text(const VerifyReport& report) {
  struct Row {
    std::uint64_t count = 0;
    double sum = 0;
    const QuantizationError* worst = nullptr;
  };
  std::map<std::string_view, Row> rows;
  for (const QuantizationError& each : report.quantized) {
    Row& row = rows[each.encoding];
    ++row.count;
    row.sum += each.relative;
    if (row.worst == nullptr || !(each.relative <= row.worst->relative)) row.worst = &each;
  }
  std::string text;
  for (const auto& [encoding, row] : rows) {
    if (row.worst->relative == 0) {
      text += fmt::format("  info: {} of {}: equal values\n", row.count, encoding);
      continue;
    }
    text +=
        fmt::format("  info: {} of {}: relative error {:.3g} in the mean, at most {:.3g} ('{}')\n",
                    row.count, encoding, row.sum / static_cast<double>(row.count),
                    row.worst->relative, printable(row.worst->name));
  }
  return text;
}

// Returns one line for each pair of dtypes.
std::string dtypes_text(const std::vector<Widened>& values, std::string_view how) {
  std::map<std::pair<std::string_view, std::string_view>, std::vector<std::string_view>> rows;
  for (const Widened& each : values) {
    rows[{each.expected, each.found}].push_back(each.name);
  }
  std::string text;
  for (const auto& [dtypes, names] : rows) {
    text += fmt::format("  info: {} of {} {} ('{}'{})\n", names.size(), dtypes.first,
                        fmt::format(fmt::runtime(how), dtypes.second), printable(names.front()),
                        names.size() > 1 ? " ..." : "");
  }
  return text;
}

}  // namespace

std::string to_table(const VerifyReport& report) {
  return only_errors([&] {
    std::string text;
    text += differences_text(report.differences);
    text += finding_lines(report.findings);
    for (const NotFinite& each : report.not_finite) {
      text += fmt::format("  info: '{}': {} NaN, {} infinite\n", printable(each.name), each.nan,
                          each.infinite);
    }
    text += quantized_text(report);
    if (report.sampled > 0) {
      text += fmt::format(
          "  info: only samples of {} were compared, because the encodings differ; to compare "
          "every byte, pass the options of the conversion (--quantize ...), or compare the output "
          "with its receipt (--receipt)\n",
          counted(report.sampled, "quantized tensor"));
    }
    text += dtypes_text(report.widened, "widened to {}, with equal values");
    text += dtypes_text(report.rounded, "rounded to {}, each to the nearest");
    text += report.ok() ? "ok; " : "not ok; ";
    if (report.is_comparison && report.ok()) text += verdict(report) + "; ";
    if (report.files > 0) {
      text += fmt::format("the digests of {} of {} are right; ", report.files_equal,
                          counted(report.files, "file"));
    }
    return text + human_bytes(report.bytes_read) + " read\n";
  });
}

}  // namespace loadstone
