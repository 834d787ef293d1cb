// loadstone inspect: lists the contents of a checkpoint from its headers alone.
#include <memory>

#include "catalog/header_findings.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/output.h"
#include "loadstone/catalog.h"

namespace loadstone::cli {

namespace {

struct InspectArgs {
  OpenArgs open;
  bool tensors = false;
};

int inspect(const InspectArgs& args, bool json) {
  const auto catalog = open_paths(args.open);
  print_line(json ? to_json(*catalog) : to_table(*catalog, args.tensors));
  const auto findings = all_findings(*catalog);
  if (const int status = exit_status(findings); status > 0) return status;
  return args.open.strict && has_warnings(findings) ? 3 : 0;
}

}  // namespace

void add_inspect(Program& program, Chosen& chosen) {
  const Command command =
      program.add_subcommand("inspect", "Show the contents of a checkpoint; reads only headers");
  const auto args = std::make_shared<InspectArgs>();
  add_checkpoint(command, args->open).required();
  command.add_flag("--tensors", args->tensors, "List every tensor");
  add_open_options(command, args->open);
  add_json_flag(command, chosen.json);
  command.set_action([args, &chosen] { return inspect(*args, chosen.json); });
}

}  // namespace loadstone::cli
