// loadstone load: runs a plan into the memory of this process, and verifies the result.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/json_writer.h"
#include "base/text.h"
#include "catalog/paths.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/options.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "cli/voice.h"
#include "formats/document.h"
#include "loadstone/audit.h"
#include "loadstone/error.h"
#include "loadstone/execute.h"
#include "loadstone/machine.h"
#include "loadstone/plan.h"
#include "plan/verdict.h"

namespace loadstone::cli {

namespace {

struct LoadArgs {
  PlanArgs plan;
  std::string plan_path;
  std::string receipt;  // kind of digest; may be empty
  std::string receipt_path;
  std::string read_ahead;
  ExecuteOptions options;  // options that need no parsing
};

// The result of a load, and its costs.
struct Outcome {
  Report report;
  Audit audit;
  ProcessMemory memory;  // memory at the end of the load
  std::uint64_t anonymous_bytes_peak = 0;
  std::vector<ProgressSample> progress;
};

// Makes a plan, or reads the plan of --plan. `typed`: names of typed options that determine a plan.
Plan planned(const LoadArgs& args, const std::vector<std::string>& typed) {
  const OpenArgs& open = args.plan.open;
  if (args.plan_path.empty()) {
    if (open.paths.empty()) throw Error("usage", "a CHECKPOINT or --plan is needed");
    return make_plan(args.plan);
  }
  for (const std::string& name : typed) {
    // --offload-folder is allowed with --plan, because the user must confirm the offload folder
    // that a plan contains.
    if (name == "--offload-folder" || name == "--max-memory") continue;
    throw Error("usage",
                fmt::format("{} cannot be combined with --plan, which already contains it", name));
  }
  // There is one path per checkpoint of the plan: first the model, then adapters.
  std::vector<std::string> roots = open.paths;
  if (roots.empty()) roots.emplace_back();
  const PlanPaths paths = {.root = roots.front(),
                           .other_roots = {roots.begin() + 1, roots.end()},
                           .plan_folder = parent_path(args.plan_path),
                           .offload_folder = args.plan.options.offload_folder,
                           .allow_remote = open.remote.allow_remote};
  return parse_file(args.plan_path, [&](const std::string& text) {
    return plan_from_json(text, open.options(), paths);
  });
}

void require_host_targets(const Plan& plan) {
  for (const PlannedTarget& target : plan.targets) {
    if (target.delivery != Delivery::memory || target.device == "cpu") continue;
    throw Error(
        "memory.device",
        fmt::format("is placed on {}, but this command can load only into the machine's memory",
                    target.device),
        {.tensor = target.name});
  }
}

Outcome do_load(const Plan& plan, const LoadArgs& args) {
  const InterruptibleWork work;
  WorkWatch watch;
  const HostMemory memory(plan);
  ExecuteOptions options = args.options;
  options.threads = args.plan.options.threads;
  if (!args.read_ahead.empty()) {
    options.read_ahead_bytes = parse_size("--read-ahead", args.read_ahead);
  }
  if (!args.receipt.empty()) options.receipt = digest_kind(args.receipt);
  options.observer = &watch;
  Outcome outcome;
  outcome.report = execute(plan, memory.destinations(), options);
  watch.finish();
  outcome.progress = watch.samples();
  outcome.memory = process_memory();
  outcome.anonymous_bytes_peak =
      std::max(watch.anonymous_bytes_peak(), outcome.memory.anonymous_bytes);
  outcome.audit = audit(plan, outcome.report);
  outcome.audit.require_real();
  if (outcome.report.receipt) write_document(args.receipt_path, to_json(*outcome.report.receipt));
  return outcome;
}

// Returns the summary of a finished load. It omits warnings, because they were printed before the
// load began.
Verdict loaded_verdict(const Plan& plan, const Report& report) {
  Verdict verdict = verdict_of(plan, fmt::format("OK: loaded {} in {:.3g} s",
                                                 human_bytes(report.bytes_read), report.seconds));
  verdict.next = proved_text(plan);
  return verdict;
}

std::string load_text(const Plan& plan, const Outcome& outcome, const TextStyle& style) {
  const Report& report = outcome.report;
  const auto on_disk = std::ranges::count_if(report.provenance, [](const Provenance& item) {
    return item.delivery == Delivery::disk_write || item.delivery == Delivery::disk_keep;
  });
  const auto without_value = outcome.audit.not_held.size() - static_cast<std::size_t>(on_disk);
  std::string text = verdict_text(loaded_verdict(plan, report), style);
  text +=
      "loaded    " + counted(report.provenance.size() - outcome.audit.not_held.size(), "target");
  if (on_disk > 0) text += fmt::format(", {} more on disk", on_disk);
  if (without_value > 0) text += fmt::format(", {} without a value on purpose", without_value);
  text += fmt::format("\nread      {} in {}", human_bytes(report.bytes_read),
                      speed_text(report.bytes_read, report.seconds));
  const auto planned_peak = plan.peak_bytes.find("cpu");
  text += '\n' + memory_text(planned_peak == plan.peak_bytes.end() ? 0 : planned_peak->second,
                             outcome.memory, outcome.anonymous_bytes_peak);
  return text + "\naudit     " + outcome.audit.text();
}

// Returns the report and measurements of this process as JSON.
std::string load_json(const Plan& plan, const Outcome& outcome) {
  JsonWriter json(2);
  json.begin_object();
  json.member("peak_bytes", plan.peak_bytes);  // planned peaks, by device
  write_process(json, outcome.memory, outcome.anonymous_bytes_peak);
  json.key("audit");
  json.begin_object();
  json.member("ok", outcome.audit.ok());
  json.member("on_meta", outcome.audit.on_meta);
  json.member("unaccounted", outcome.audit.unaccounted);
  json.member("not_held", outcome.audit.not_held);
  json.end_object();
  return joined(std::move(json), to_json(outcome.report));
}

int load(const LoadArgs& args, const std::vector<std::string>& typed, bool json) {
  if (args.receipt.empty() != args.receipt_path.empty()) {
    throw Error("usage", "--receipt KIND and --receipt-file FILE must be passed together");
  }
  require_document(args.receipt_path);
  Plan plan = planned(args, typed);
  if (args.plan.open.strict) {
    for (TieCheck& check : plan.tie_checks) check.is_error = true;
  }
  compare_with_machine(plan, args.plan, !args.plan_path.empty());
  write_page(plan, args.plan);
  if (const Finding* const first = obstacle(plan.findings, args.plan.open.strict)) {
    if (!json) print_hint(verdict_of(plan).first + "; nothing was read");
    return refuse(plan.findings, *first, "'loadstone plan'", json);
  }
  require_host_targets(plan);
  if (!json) print_warnings(plan.findings);
  const Outcome outcome = do_load(plan, args);
  const std::vector<Finding> found = found_since(plan.findings, outcome.report.findings);
  if (!json) print_warnings(found);
  LoadFigures figures = figures_of(outcome.report);
  figures.process_bytes_peak = outcome.memory.peak_bytes;
  figures.progress = outcome.progress;
  write_page(plan, args.plan, figures);
  print_report([&](const TextStyle& style) { return load_text(plan, outcome, style); },
               json ? load_json(plan, outcome) : std::string());
  return args.plan.open.strict && has_warnings(found) ? 3 : 0;
}

}  // namespace

void add_load(Program& program, Chosen& chosen) {
  const Command command = program.add_subcommand(
      "load", "Load into memory and audit the result; shows speed and memory");
  const auto args = std::make_shared<LoadArgs>();
  add_checkpoint(command, args->plan.open);
  command.add_option("--plan", args->plan_path, "FILE",
                     "Execute this plan ('plan -o' writes one); CHECKPOINT is then\n"
                     "the folder of the shards, if they have moved;\n"
                     "one per adapter follows.\n"
                     "If it writes to disk, pass --offload-folder again");
  const Command plan_options = add_plan_options(command, args->plan);
  add_readers_option(command, args->plan.options.threads, "Readers");
  command.add_option("--read-ahead", args->read_ahead, "SIZE",
                     "How far ahead of the readers loadstone asks the system to read bytes\nthat "
                     "its page cache lacks; 0: never" +
                         default_text(human_bytes(defaults::read_ahead_bytes)));
  command.add_flag("--interleave", args->options.interleave,
                   "Allocate memory from all NUMA nodes in turn");
  add_html_option(command, args->plan.html_path);
  add_receipt_option(
      command, args->receipt,
      "Write digests (KIND) of all bytes read and of every tensor in memory to\n--receipt-file; "
      "'verify CHECKPOINT --receipt-file FILE' compares them later:\n");
  command.add_option("--receipt-file", args->receipt_path, "FILE",
                     "The file that --receipt writes");
  command.add_flag("--allow-remote", args->plan.open.remote.allow_remote,
                   "Allow requests to the host of the plan's checkpoint");
  add_open_options(command, args->plan.open);
  add_json_flag(command, chosen.json);
  add_progress_options(command, chosen.voice);
  command.set_action([args, plan_options, &chosen] {
    return load(*args, plan_options.typed_options(), chosen.json);
  });
}

}  // namespace loadstone::cli
