// Formats conversions and their reports as text and JSON.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "base/finding_json.h"
#include "base/only_errors.h"
#include "base/text.h"
#include "convert/choose/choose.h"
#include "convert/kept_blocks.h"
#include "convert/quantize_rows.h"
#include "convert/repack.h"
#include "formats/metadata.h"
#include "loadstone/convert.h"
#include "tensor/tensor_json.h"

namespace loadstone {

namespace {

struct Total {
  std::size_t tensors = 0;
  std::uint64_t bytes = 0;
};

std::string file_label(const OutputFile& file) {
  return file.name.empty() ? "one file" : file.name;
}

struct RepackedRow {
  std::string names;
  std::string shape;
  std::string encoding;
  std::size_t tensors = 0;
  std::size_t rounded = 0;  // number of tensors with a rounded global scale
  double largest_error = 0;
};

// Returns one row per group of repacked tensors with similar names, equal shapes and equal
// encodings.
std::vector<RepackedRow> repacked_rows(const Conversion& conversion) {
  std::map<std::tuple<std::string, std::string, std::string>, RepackedRow> groups;
  for (const RepackedTensor& tensor : conversion.repacked) {
    RepackedRow made = {folded_name(tensor.name), tensor.shape.text(),
                        tensor.quantization.encoding};
    auto key = std::tuple(made.names, made.shape, made.encoding);
    RepackedRow& row = groups.try_emplace(std::move(key), std::move(made)).first->second;
    ++row.tensors;
    row.rounded += tensor.error > 0 ? 1 : 0;
    row.largest_error = std::max(row.largest_error, tensor.error);
  }
  std::vector<RepackedRow> rows;
  for (auto& [like, row] : groups) rows.push_back(std::move(row));
  return rows;
}

std::string repacked_text(const Conversion& conversion) {
  const std::string rounding = rounding_text(conversion.repacked);
  const bool is_exact = rounding.empty();
  std::string text = fmt::format(
      "repacked, {}{}{}\n", name(is_exact ? Fidelity::exact : Fidelity::exact_where_scales_fit),
      is_exact ? "" : ": ", rounding);
  for (const RepackedRow& row : repacked_rows(conversion)) {
    text += fmt::format("  {:<52} {:<18} {:>6} x  {}\n", printable(row.names),
                        printable(row.shape, 80), row.tensors, row.encoding);
  }
  return text;
}

// Lists old and new encodings, and unchanged tensors with the reason.
std::string rows_text(const Conversion& conversion) {
  Total before;
  Total after;
  std::string quantized;
  std::string plain;
  for (const QuantizeRow& row : conversion.quantize_rows) {
    std::string& text = row.reason.empty() ? quantized : plain;
    std::string sizes =
        row.before == row.after
            ? fmt::format("{}, {}", row.before, human_bytes(row.bytes_before))
            : fmt::format("{} -> {}, {} -> {}", row.before, row.after,
                          human_bytes(row.bytes_before), human_bytes(row.bytes_after));
    if (row.reason.empty()) sizes += ", " + fidelity_text(row.fidelity, row.typical_error);
    if (!row.reason.empty()) sizes += ": " + row.reason;
    text += fmt::format("  {:<52} {:<18} {:>6} x  {}\n", printable(row.names),
                        printable(row.shape, 80), row.tensors, sizes);
    before.bytes += row.bytes_before;
    after.bytes += row.bytes_after;
  }
  std::string text = fmt::format("quantized ({} -> {} with unchanged tensors)\n",
                                 human_bytes(before.bytes), human_bytes(after.bytes));
  text += quantized;
  if (!plain.empty()) text += "left alone\n" + plain;
  return text;
}

}  // namespace

static void visit_fields(JsonWriter& json, const RequantizedTensors& each) {
  json.member("encoding", each.encoding);
  json.member("tensors", each.tensors);
  json.member("blocks", each.loss.blocks);
  json.member("exact_blocks", each.loss.exact_blocks);
  json.member("largest_error", each.loss.largest_error);
}

static void visit_fields(JsonWriter& json, const ConvertReport& report) {
  json.member("outputs", report.outputs);
  write_work(json, report);
  json.member("page_cache", report.page_cache);
  json.optional("requantized", report.requantized);
}

std::string to_text(const std::vector<RequantizedTensors>& encodings) {
  return only_errors([&] {
    std::string text;
    for (const auto& [encoding, tensors, loss] : encodings) {
      text += fmt::format("{}: {} of {} blocks exact ({})", encoding, loss.exact_blocks,
                          loss.blocks, counted(tensors, "tensor"));
      if (loss.largest_error > 0) {
        text += fmt::format("; largest error {:.2g} % of the largest magnitude in its block",
                            100 * loss.largest_error);
      }
      text += '\n';
    }
    return text;
  });
}

std::string to_json(const ConvertReport& report) {
  return only_errors([&] { return json_text(report, 2); });
}

static void visit_fields(JsonWriter& json, const OutputFile& file) {
  json.member("name", file.name);
  json.member("tensors", file.tensors.size());
  json.member("bytes", file.byte_count());
}

static void visit_fields(JsonWriter& json, const QuantizeRow& row) {
  json.member("names", row.names);
  json.member("shape", row.shape);
  json.member("before", row.before);
  json.member("after", row.after);
  json.optional("left_alone", row.reason);
  if (row.reason.empty()) {
    json.member("fidelity", name(row.fidelity));
    if (row.typical_error > 0) json.member("typical_error", row.typical_error);
  }
  json.member("tensors", row.tensors);
  json.member("bytes_before", row.bytes_before);
  json.member("bytes_after", row.bytes_after);
}

static void visit_fields(JsonWriter& json, const RepackedRow& row) {
  json.member("names", row.names);
  json.member("shape", row.shape);
  json.member("encoding", row.encoding);
  json.member("tensors", row.tensors);
  if (json.optional("rounded", row.rounded)) json.member("largest_error", row.largest_error);
}

static void visit_fields(JsonWriter& json, const PlannedTarget& target,
                         const Conversion& conversion, bool is_repacked) {
  const StoredType type = stored_type(conversion, target);
  json.member("dtype", type.encoding);
  json.member("shape", type.shape);
  if (target.quantization) json.member("encoding", target.quantization->encoding);
  if (is_repacked) {
    json.member("lossless", "repacked");
  } else if (!target.quantization && !type.encoding.is_dtype()) {
    json.member("lossless", "kept");
  }
  json.member("bytes", target.byte_count());
  json.member("made_of", source_encodings(conversion.plan, target));
}

static void visit_fields(JsonWriter& json, const Conversion& conversion) {
  json.member("files", conversion.files);
  std::set<std::string_view> repacked;  // the targets of tensors whose values do not change
  for (const RepackedTensor& each : conversion.repacked) {
    if (each.error == 0) repacked.insert(each.targets.begin(), each.targets.end());
  }
  json.key("tensors");
  json.begin_object();
  for (const PlannedTarget& target : conversion.plan.targets) {
    json.member(target.name, target, conversion, repacked.contains(target.name));
  }
  json.end_object();
  json.member("metadata", conversion.metadata);
  json.optional("quantize", conversion.quantize_rows);
  json.optional("repacked", repacked_rows(conversion));
  json.member("threads", conversion.budget.threads);
  json.member("bytes_to_read", conversion.bytes_to_read);
  json.member("bytes_to_write", conversion.bytes_to_write);
  json.member("peak_bytes", conversion.peak_bytes);
  json.member("findings", conversion.plan.findings);
}

std::string to_json(const Conversion& conversion) {
  return only_errors([&] { return json_text(conversion, 2); });
}

static std::string table_of(const Conversion& conversion, bool with_tensors) {
  const Plan& plan = conversion.plan;
  std::string text =
      fmt::format("{}, {} to read, {} to write, {} of memory at most\n",
                  counted(plan.targets.size(), "tensor"), human_bytes(conversion.bytes_to_read),
                  human_bytes(conversion.bytes_to_write), human_bytes(conversion.peak_bytes));
  text += "files\n";
  for (const OutputFile& file : conversion.files) {
    text += fmt::format("  {:<48} {:>15} {:>10}\n", file_label(file),
                        counted(file.tensors.size(), "tensor"), human_bytes(file.byte_count()));
  }
  std::map<std::pair<std::string, std::string_view>, Total> totals;
  for (const PlannedTarget& target : plan.targets) {
    Total& total = totals[{source_encodings(plan, target), output_encoding(conversion, target)}];
    ++total.tensors;
    total.bytes += target.byte_count();
  }
  text += "encodings\n";
  for (const auto& [change, total] : totals) {
    text += fmt::format("  {:<32} {:>15} {:>10}\n",
                        fmt::format("{} to {}", change.first, change.second),
                        counted(total.tensors, "tensor"), human_bytes(total.bytes));
  }
  if (!conversion.quantize_rows.empty()) text += rows_text(conversion);
  if (!conversion.repacked.empty()) text += repacked_text(conversion);
  if (!conversion.extras.empty()) {
    text += "other files\n ";
    for (const ExtraFile& file : conversion.extras) text += " " + printable(file.name);
    text += "\n";
  }
  if (with_tensors) text += "tensors\n";
  for (const PlannedTarget& target : plan.targets) {
    if (!with_tensors) break;
    const StoredType type = stored_type(conversion, target);
    text += fmt::format("  {:<56} {:<8} {:<24} {:>10}  {}\n", printable(target.name),
                        output_encoding(conversion, target), printable(type.shape.text(), 80),
                        human_bytes(target.byte_count()), source_encodings(plan, target));
  }
  if (!plan.findings.empty()) text += "findings\n";
  return text + finding_lines(plan.findings);
}

std::string to_table(const Conversion& conversion, bool with_tensors) {
  return only_errors([&] { return table_of(conversion, with_tensors); });
}

}  // namespace loadstone
