// loadstone verify: checks the values of one checkpoint, or compares two checkpoints tensor by
// tensor.
#include "loadstone/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "base/finding_json.h"
#include "base/json_writer.h"
#include "catalog/header_findings.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/log.h"
#include "cli/options.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "cli/write.h"
#include "formats/sharded_index.h"
#include "loadstone/catalog.h"
#include "loadstone/error.h"
#include "loadstone/receipt.h"
#include "loadstone/remote.h"
#include "receipt/receipt_file.h"

namespace loadstone::cli {

namespace {

namespace fs = std::filesystem;

struct VerifyArgs {
  OpenArgs open;  // its paths are unused, because `first` and `second` name the checkpoints
  std::string first;
  std::string second;
  VerifyOptions options;
  bool receipt = false;
  bool digests = false;
  std::string receipt_path;
  std::vector<std::string> sources;
  WriteArgs conversion;  // the conversion of `first` that made `second`
  std::vector<Command> conversion_groups;

  // Returns the options of the conversion that were typed.
  [[nodiscard]] std::vector<std::string> conversion_options() const {
    std::vector<std::string> typed;
    for (const Command& group : conversion_groups) {
      std::ranges::move(group.typed_options(), std::back_inserter(typed));
    }
    return typed;
  }
};

VerifyReport read_all(const Catalog& first, const Catalog* second, const VerifyArgs& args) {
  const InterruptibleWork work;
  WorkWatch watch;
  VerifyOptions options = args.options;
  options.observer = &watch;
  options.is_finite = args.open.strict;
  std::error_code problem;
  options.is_folder = fs::is_directory(args.first, problem);
  const VerifyReport report = [&] {
    if (args.digests) return verify_digests(first, options);
    return second == nullptr ? verify_values(first, options) : compare(first, *second, options);
  }();
  watch.finish();
  return report;
}

// Returns the report, with the findings from opening the checkpoints, as JSON.
std::string verify_json(const VerifyReport& report, const std::vector<Finding>& warnings) {
  JsonWriter json(2);
  json.begin_object();
  json.member("warnings", warnings);
  return joined(std::move(json), to_json(report));
}

// Prints the JSON document or, if it is empty, the report as text. The log gets the text.
void print_result(const VerifyReport& report, const std::string& json) {
  log_report([&](const TextStyle&) { return to_table(report); });
  print_line(json.empty() ? to_table(report) : json);
}

std::string split_suffix() { return ".gguf" + std::string(receipt_suffix); }

// Returns the path of a file's receipt. For a part of a split GGUF, this is the receipt of all
// parts.
std::string receipt_of_file(const std::string& file) {
  const std::string whole = file + std::string(receipt_suffix);
  const fs::path path(file);
  const auto part = parse_part_name(path.stem().string());
  std::error_code problem;
  if (!part || path.extension() != ".gguf" || fs::exists(whole, problem)) return whole;
  return (path.parent_path() / (part->stem + split_suffix())).string();
}

// Returns the path of receipt.json, or of the receipt of the folder's only split GGUF.
std::string receipt_of_folder(const std::string& folder) {
  const std::string usual = folder + "/" + std::string(receipt_file_name);
  std::vector<std::string> found;
  std::error_code problem;
  if (fs::exists(usual, problem)) return usual;
  for (const auto& entry : fs::directory_iterator(folder, problem)) {
    const std::string path = entry.path().string();
    if (path.ends_with(split_suffix())) found.push_back(path);
  }
  return found.size() == 1 ? found.front() : usual;
}

// Returns the path of the receipt: the typed path, or the path next to the output to which
// conversions write it.
std::string receipt_path(const VerifyArgs& args) {
  if (!args.receipt_path.empty()) return args.receipt_path;
  if (is_remote(args.first)) {
    throw Error("usage",
                "--receipt can find the receipt only on this machine; pass the receipt's file "
                "(--receipt-file FILE)",
                {.path = args.first});
  }
  std::error_code problem;
  return fs::is_directory(args.first, problem) ? receipt_of_folder(args.first)
                                               : receipt_of_file(args.first);
}

// Returns the path of the output A. If A is the target name of a conversion to a split GGUF, no
// file has this name, so the result is the first part.
std::string output_path(const VerifyArgs& args, const Receipt& receipt) {
  const bool is_split = receipt.outputs.size() > 1 && args.first.ends_with(".gguf");
  std::error_code problem;
  if (!is_split || is_remote(args.first) || fs::exists(args.first, problem)) return args.first;
  return (fs::path(args.first).parent_path() / receipt.outputs.front().path).string();
}

int verify_with_receipt(const VerifyArgs& args, bool json) {
  if (!args.second.empty()) {
    throw Error("usage", "--receipt compares A with a receipt: omit B");
  }
  const Receipt receipt =
      parse_file(receipt_path(args), receipt_from_json, {"receipt.json", receipt_json_bytes_max});
  const InterruptibleWork work;
  WorkWatch watch;
  VerifyOptions options = args.options;
  options.storage = args.open.options().storage;
  options.observer = &watch;
  // A load writes no files, so A is the first checkpoint that the load read.
  const bool is_load = receipt.outputs.empty();
  std::vector<std::string> sources = args.sources;
  if (is_load) sources.insert(sources.begin(), args.first);
  const VerifyReport report = verify_receipt(
      receipt, is_load ? std::string() : output_path(args, receipt), sources, options);
  watch.finish();
  print_result(report, json ? to_json(report) : std::string());
  return report.ok() ? 0 : 1;
}

// Plans the conversion whose output `second` should be.
Conversion planned_conversion(const std::shared_ptr<const Catalog>& first, const Catalog& second,
                              const VerifyArgs& args) {
  WriteArgs write = args.conversion;
  const bool is_gguf = second.shards().front().format == FileFormat::gguf;
  write.target = is_gguf ? "B.gguf" : "B";  // only its suffix matters, because nothing is written
  write.options.threads = args.options.threads;
  return make_conversion(first, write_options(write, args.first, *first));
}

int verify_conversion(const std::shared_ptr<const Catalog>& first, const Catalog& second,
                      const VerifyArgs& args, bool json) {
  const Conversion conversion = planned_conversion(first, second, args);
  const std::vector<Finding>& warnings = conversion.plan.findings;
  if (const Finding* const error = obstacle(warnings, args.open.strict)) {
    return refuse(warnings, *error, "'loadstone convert --dry-run'", json);
  }
  if (!json) print_warnings(warnings);
  const InterruptibleWork work;
  WorkWatch watch;
  VerifyOptions options = args.options;
  options.observer = &watch;
  const VerifyReport report = compare_with_conversion(conversion, second, options);
  watch.finish();
  print_result(report, json ? verify_json(report, warnings) : std::string());
  return report.ok() ? 0 : 1;
}

int verify(const VerifyArgs& args, bool json) {
  const std::vector<std::string> conversion = args.conversion_options();
  const bool has_receipt = args.receipt || !args.receipt_path.empty();
  if (!conversion.empty() && (has_receipt || args.digests || args.second.empty())) {
    throw Error("usage", fmt::format("{} describes the conversion of A that made B: pass B, and "
                                     "omit receipts and --digests",
                                     conversion.front()));
  }
  const bool is_direct = conversion.empty() && !has_receipt && !args.digests;
  if (args.options.require_lossless && (!is_direct || args.second.empty())) {
    throw Error("usage",
                "--lossless compares the values of A and B as they are: pass B, and omit "
                "receipts, --digests and the options of the conversion");
  }
  if (has_receipt) return verify_with_receipt(args, json);
  if (!args.sources.empty()) throw Error("usage", "--source needs --receipt");
  if (args.digests && !args.second.empty()) {
    throw Error("usage", "--digests checks only A: omit B");
  }
  const auto first = open_checkpoint(args.first, args.open.options());
  const auto second = args.second.empty() ? std::shared_ptr<const Catalog>()
                                          : open_checkpoint(args.second, args.open.options());
  if (!conversion.empty()) return verify_conversion(first, *second, args, json);
  std::vector<Finding> warnings = first->findings();
  if (second) warnings.insert(warnings.end(), second->findings().begin(), second->findings().end());
  if (!json) print_warnings(warnings);
  const VerifyReport report = read_all(*first, second.get(), args);
  print_result(report, json ? verify_json(report, warnings) : std::string());
  if (const int status = exit_status(report.findings); status > 0) return status;
  if (!report.ok()) return 1;
  return args.open.strict && has_warnings(warnings) ? 3 : 0;
}

}  // namespace

void add_verify(Program& program, Chosen& chosen) {
  const Command command = program.add_subcommand(
      "verify", "Check one checkpoint's structure and values, or compare two");
  const auto args = std::make_shared<VerifyArgs>();
  command.add_option("A", args->first, "", "A file, a folder, an index, or a pattern in quotes")
      .required();
  command.add_option("B", args->second, "", "Another checkpoint, to compare tensor by tensor");
  command.add_flag("--lossless", args->options.require_lossless,
                   "Require that all values of B equal those of A as real numbers");
  command.add_flag(
      "--digests", args->digests,
      "Check A's files in a Hugging Face cache against the SHA-256 in their file names");
  command.add_flag("--receipt", args->receipt,
                   "Compare every byte of A, by digests, with the receipt next to it");
  command.add_option("--receipt-file", args->receipt_path, "FILE",
                     "Compare A with the receipt in FILE");
  command
      .add_option("--source", args->sources, "PATH",
                  "With a receipt: also compare a source of A; repeat for each BASE,\nmodel and "
                  "adapter of a merge")
      .shown_once();
  add_threads_option(command, args->options.threads, "Readers", defaults::verify_threads_max);
  args->conversion_groups = add_conversion_options(command, args->conversion);
  add_open_options(command, args->open);
  add_json_flag(command, chosen.json);
  add_progress_options(command, chosen.voice);
  command.set_action([args, &chosen] { return verify(*args, chosen.json); });
}

}  // namespace loadstone::cli
