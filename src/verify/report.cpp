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

static void visit_fields(JsonWriter& json, const ErrorSize& error) {
  json.member("largest_error", error.largest);
  json.member("relative_error", error.relative);
}

static void visit_fields(JsonWriter& json, const Difference& difference) {
  json.member("name", difference.name);
  json.member("kind", difference.kind);
  json.member("found", difference.found);
  json.member("expected", difference.expected);
  if (difference.error) visit_fields(json, *difference.error);
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
  json.member("largest_error", error.largest);
}

static void visit_fields(JsonWriter& json, const Widened& tensor) {
  json.member("name", tensor.name);
  json.member("found", tensor.found);
  json.member("expected", tensor.expected);
}

namespace {

// The differences with the largest errors. Null if no difference has a known error.
struct LargestErrors {
  const Difference* absolute = nullptr;
  const Difference* relative = nullptr;
};

LargestErrors largest_errors(const VerifyReport& report) {
  LargestErrors found;
  for (const Difference& each : report.differences) {
    if (!each.error) continue;
    if (found.absolute == nullptr || each.error->largest > found.absolute->error->largest) {
      found.absolute = &each;
    }
    if (found.relative == nullptr || each.error->relative > found.relative->error->relative) {
      found.relative = &each;
    }
  }
  return found;
}

}  // namespace

// Returns the verdict on two checkpoints whose values do not differ. Empty if they differ.
static std::string verdict(const VerifyReport& report) {
  const bool has_pairs =
      !report.quantized.empty() || !report.widened.empty() || !report.rounded.empty();
  if (report.ok() && !has_pairs) return "equal";
  double worst = 0;
  const bool is_rounded = !report.rounded.empty();
  for (const QuantizationError& each : report.quantized) {
    if (!(each.relative <= worst)) worst = each.relative;  // also if it is NaN
  }
  if (!report.ok()) {
    const auto is_equal = [](const Difference& each) {
      return each.error && each.error->largest == 0;
    };
    const bool are_equal = worst == 0 && !is_rounded && !report.differences.empty() &&
                           std::ranges::all_of(report.differences, is_equal);
    return are_equal ? "equal as real numbers" : "";
  }
  if (worst != 0) return fmt::format("a relative error of at most {:.3g}", worst);
  return is_rounded ? "equal up to rounding to the new dtype" : "equal as real numbers";
}

static void visit_fields(JsonWriter& json, const VerifyReport& report) {
  json.member("ok", report.ok());
  if (report.is_comparison) json.optional("verdict", verdict(report));
  if (const auto [absolute, relative] = largest_errors(report); absolute != nullptr) {
    json.member("largest_error", absolute->error->largest);
    json.member("largest_error_in", absolute->name);
    json.member("relative_error", relative->error->relative);
    json.member("relative_error_in", relative->name);
  }
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
    double largest = 0;
    const QuantizationError* worst = nullptr;
  };
  std::map<std::string_view, Row> rows;
  for (const QuantizationError& each : report.quantized) {
    Row& row = rows[each.encoding];
    ++row.count;
    row.sum += each.relative;
    row.largest = std::max(row.largest, each.largest);
    if (row.worst == nullptr || !(each.relative <= row.worst->relative)) row.worst = &each;
  }
  std::string text;
  for (const auto& [encoding, row] : rows) {
    if (row.worst->relative == 0) {
      text += fmt::format("  info: {} of {}: equal values\n", row.count, encoding);
      continue;
    }
    text += fmt::format(
        "  info: {} of {}: relative error {:.3g} in the mean, at most {:.3g} ('{}'); "
        "largest error {:.3g}\n",
        row.count, encoding, row.sum / static_cast<double>(row.count), row.worst->relative,
        printable(row.worst->name), row.largest);
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
    if (const auto [absolute, relative] = largest_errors(report);
        absolute != nullptr && absolute->error->largest > 0) {
      text +=
          fmt::format("  info: largest error {:.2g} ('{}'), largest relative error {:.2g} ('{}')\n",
                      absolute->error->largest, printable(absolute->name),
                      relative->error->relative, printable(relative->name));
    }
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
    if (const std::string found = verdict(report); report.is_comparison && !found.empty()) {
      text += found + "; ";
    }
    if (report.files > 0) {
      text += fmt::format("the digests of {} of {} are right; ", report.files_equal,
                          counted(report.files, "file"));
    }
    return text + human_bytes(report.bytes_read) + " read\n";
  });
}

}  // namespace loadstone
