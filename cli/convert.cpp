// loadstone convert: converts one checkpoint into another, from files to files, in bounded memory.
#include "loadstone/convert.h"

#include <fmt/format.h>

#include <memory>
#include <string>
#include <string_view>

#include "base/text.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/output.h"
#include "cli/write.h"
#include "loadstone/error.h"

namespace loadstone::cli {

namespace {

struct ConvertArgs {
  OpenArgs open;
  std::string to;
  WriteArgs write;
};

// Checks that --to, if given, repeats the format that the target's name determines.
void check_format(const ConvertArgs& args) {
  const auto format = format_of_target(args.write.target);
  if (args.to.empty() || args.to == name(format.value_or(FileFormat::safetensors))) return;
  throw Error("usage", fmt::format("--to {} contradicts TARGET, which determines the format: "
                                   "NAME.safetensors, NAME.gguf or a folder for safetensors",
                                   printable(args.to)));
}

int convert(const ConvertArgs& args, bool json) {
  check_format(args);
  check_write(args.write);
  const auto catalog = open_paths(args.open);
  const ConvertOptions options = write_options(args.write, args.open.paths.front(), *catalog);
  return write_checkpoint(catalog, options, args.write, args.open.strict, json);
}

}  // namespace

void add_convert(Program& program, Chosen& chosen) {
  const Command command = program.add_subcommand(
      "convert", "Convert, quantize or re-shard a checkpoint in bounded memory");
  const auto args = std::make_shared<ConvertArgs>();
  args->open.paths.resize(1);
  args->open.gguf_rank_max = defaults::gguf_rank_most;
  command
      .add_option("SOURCE", args->open.paths.front(), "",
                  "A file, a folder, an index, or a pattern")
      .required();
  command
      .add_option("TARGET", args->write.target, "",
                  "NAME.safetensors or NAME.gguf for one file; any other name is a folder for "
                  "shards and an index")
      .required();
  command.add_option("--to", args->to, "FORMAT",
                     "Format to write; optional, because TARGET determines it");
  add_rules_option(command, args->write);
  command.add_choice("--unexpected", args->write.options.unexpected, "P",
                     "What to do with tensors that no recipe uses");
  add_write_options(command, args->write);
  add_layout_options(command, args->write);
  command.add_flag("--require-lossless", args->write.options.require_lossless,
                   "Reject the conversion if a value would change, before reading if possible");
  add_open_options(command, args->open);
  add_json_flag(command, chosen.json);
  add_progress_options(command, chosen.voice);
  command.set_action([args, &chosen] { return convert(*args, chosen.json); });
}

}  // namespace loadstone::cli
