// loadstone plan: shows the plan of a load without reading tensor data.
#include "loadstone/plan.h"

#include <fmt/format.h>

#include <memory>

#include "cli/commands.h"
#include "cli/duration.h"
#include "cli/options.h"
#include "cli/output.h"
#include "cli/voice.h"
#include "formats/document.h"
#include "loadstone/error.h"
#include "loadstone/machine.h"
#include "plan/verdict.h"

namespace loadstone::cli {

namespace {

struct PlanCommandArgs {
  PlanArgs plan;
  std::string output_path;
};

int show_plan(const PlanCommandArgs& args, bool json) {
  Plan plan = make_plan(args.plan);
  if (!args.output_path.empty()) write_document(args.output_path, to_json(plan));
  compare_with_machine(plan, args.plan);
  write_page(plan, args.plan);
  print_line(json ? with_duration(duration_of(plan), to_json(plan))
                  : plan_text(plan, style_of(stdout), available_memory_bytes()) +
                        duration_line(duration_of(plan)));
  // The first finding is the most severe one, because findings are sorted by severity.
  if (!plan.ok()) return exit_status(plan.findings.front().code);
  return args.plan.open.strict && has_warnings(plan.findings) ? 3 : 0;
}

}  // namespace

void add_plan(Program& program, Chosen& chosen) {
  const Command command =
      program.add_subcommand("plan", "Show what a load would do; reads no weights");
  const auto args = std::make_shared<PlanCommandArgs>();
  add_checkpoint(command, args->plan.open).required();
  add_plan_options(command, args->plan);
  add_readers_option(command, args->plan.options.threads,
                     "Number of readers that the load will use");
  command.add_option("-o,--output", args->output_path, "FILE",
                     "Also write the plan as JSON, for 'loadstone load --plan'");
  add_html_option(command, args->plan.html_path);
  add_open_options(command, args->plan.open);
  add_json_flag(command, chosen.json);
  command.set_action([args, &chosen] { return show_plan(*args, chosen.json); });
}

}  // namespace loadstone::cli
