// loadstone merge: merges models and adapters into one model, from files to files, in bounded
// memory.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/options.h"
#include "cli/write.h"
#include "loadstone/error.h"
#include "loadstone/merge_options.h"

namespace loadstone::cli {

namespace {

struct MergeArgs {
  OpenArgs open;
  AdapterArgs lora;
  bool normalise = false;
  MergeOptions options;
  WriteArgs write;
};

int merge(const MergeArgs& args, bool json) {
  if (args.open.paths.size() == 1 && args.lora.adapters.empty()) {
    throw Error("usage", "there is only one model: pass a second MODEL, or --lora ADAPTER");
  }
  check_write(args.write);
  MergeOptions options = args.options;
  if (args.normalise) options.normalise = true;
  options.weights.clear();
  std::vector<std::shared_ptr<const Catalog>> checkpoints;
  std::string base;
  for (const std::string& text : args.open.paths) {
    auto [path, weight] = parse_weighted(text);
    checkpoints.push_back(open_checkpoint(path, args.open.options()));
    options.weights.push_back(weight);
    if (base.empty()) base = std::move(path);
  }
  options.adapters = args.lora.open(args.open, checkpoints);
  options.tie = args.lora.tie;
  ConvertOptions all = write_options(args.write, base, *checkpoints.front());
  all.merge = std::move(options);
  const auto catalog = std::make_shared<const Catalog>(std::move(checkpoints));
  return write_checkpoint(catalog, all, args.write, args.open.strict, json);
}

}  // namespace

void add_merge(Program& program, Chosen& chosen) {
  const Command command =
      program.add_subcommand("merge", "Merge models and adapters in bounded memory");
  const auto args = std::make_shared<MergeArgs>();
  args->open.gguf_rank_max = defaults::gguf_rank_most;
  command
      .add_option("MODEL", args->open.paths, "",
                  "The base, or the models to merge, each with its weight: a:0.5 b:0.5")
      .required();
  command
      .add_option("-o,--output", args->write.target, "TARGET",
                  "NAME.safetensors or NAME.gguf for one file; any other name is a folder for "
                  "shards and an index")
      .required();
  add_adapter_options(command, args->lora);
  command.add_choice("--method", args->options.method, "M",
                     "Method for models: linear (default), slerp, task-arithmetic, ties,\n"
                     "dare-linear or dare-ties; except for linear, the first is the base");
  command.add_flag("--normalise", args->normalise,
                   "Divide by the sum of the weights (ties and dare-ties always do)");
  command.add_option("--scale", args->options.scale, "S",
                     "Factor for all differences from the base");
  command.add_option("--density", args->options.density, "P",
                     "For ties and dare: the share of each difference that is kept");
  command.add_option("--seed", args->options.seed, "N", "For dare: the seed of its random choices");
  add_write_options(command, args->write);
  add_open_options(command, args->open);
  add_json_flag(command, chosen.json);
  add_progress_options(command, chosen.voice);
  command.set_action([args, &chosen] { return merge(*args, chosen.json); });
}

}  // namespace loadstone::cli
