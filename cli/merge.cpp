// loadstone merge: models and adapters made into one model, file to file, in bounded memory.
#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/write.h"
#include "loadstone/error.h"
#include "loadstone/merge_options.h"

namespace loadstone::cli {

namespace {

struct Args {
  OpenArgs open;
  std::vector<std::string> adapters;
  std::vector<std::string> ignore;
  std::string method = "linear";
  bool normalise = false;
  MergeOptions options;
  WriteArgs write;
};

struct Weighted {
  std::string path;
  float weight = 1;
};

// "models/a:0.5". A path that is there means itself.
Weighted weighted(const std::string& text) {
  std::error_code problem;
  const auto colon = text.rfind(':');
  if (colon == std::string::npos || std::filesystem::exists(text, problem)) return {text};
  float weight = 0;
  const char* const end = text.data() + text.size();
  const auto [after, error] = std::from_chars(text.data() + colon + 1, end, weight);
  if (error != std::errc() || after != end) return {text};
  if (!std::isfinite(weight)) {
    throw Error("usage", fmt::format("'{}': a weight is a finite number", printable(text)));
  }
  return {text.substr(0, colon), weight};
}

int merge(const Args& args, bool json) {
  if (args.open.paths.size() == 1 && args.adapters.empty()) {
    throw Error("usage", "there is nothing to merge: name a second MODEL, or --lora ADAPTER");
  }
  if (!args.ignore.empty() && args.adapters.empty()) {
    throw Error("usage", "--lora-ignore goes with --lora");
  }
  check_write(args.write);
  MergeOptions options = args.options;
  options.method = merge_method(args.method).value();
  if (args.normalise) options.normalise = true;
  options.weights.clear();
  std::vector<std::shared_ptr<const Catalog>> checkpoints;
  std::string base;
  for (const std::string& text : args.open.paths) {
    auto [path, weight] = weighted(text);
    checkpoints.push_back(open_checkpoint(path, args.open.options()));
    options.weights.push_back(weight);
    if (base.empty()) base = std::move(path);
  }
  for (const std::string& text : args.adapters) {
    const auto [path, factor] = weighted(text);
    checkpoints.push_back(open_checkpoint(path, args.open.options()));
    options.adapters.push_back({.factor = factor, .ignore = args.ignore});
  }
  ConvertOptions all = write_options(args.write, base);
  all.merge = std::move(options);
  const auto catalog = std::make_shared<const Catalog>(std::move(checkpoints));
  return write_checkpoint(catalog, all, args.write, args.open.strict, json);
}

}  // namespace

void add_merge(CLI::App& app, Chosen& chosen) {
  auto* command = app.add_subcommand("merge", "Merge models and adapters, in bounded memory");
  const auto args = std::make_shared<Args>();
  args->open.gguf_rank_max = gguf_rank_max;
  command
      ->add_option("MODEL", args->open.paths,
                   "The base, or the models to add, each with its weight: a:0.5 b:0.5")
      ->type_name("")
      ->required();
  command
      ->add_option("-o,--output", args->write.target,
                   "NAME.safetensors or NAME.gguf: one file; else a folder for shards and index")
      ->type_name("TARGET")
      ->required();
  command
      ->add_option("--lora", args->adapters,
                   "An adapter with the factor of what it adds: a:0.8; repeatable")
      ->type_name("ADAPTER")
      ->allow_extra_args(false);
  command
      ->add_option("--lora-ignore", args->ignore,
                   "Tensors of adapters that are left out, by a pattern; repeatable")
      ->type_name("PATTERN")
      ->allow_extra_args(false);
  command
      ->add_option("--method", args->method,
                   "How models become one: linear (default), slerp, task-arithmetic, ties,\n"
                   "dare-linear or dare-ties; but for linear the first is the base")
      ->type_name("M")
      ->check(CLI::IsMember(
          {"linear", "slerp", "task-arithmetic", "ties", "dare-linear", "dare-ties"}));
  command->add_flag("--normalise", args->normalise,
                    "Divide by the sum of the weights (ties and dare-ties always do)");
  command->add_option("--scale", args->options.scale, "Of all differences from the base together")
      ->type_name("S");
  command
      ->add_option("--density", args->options.density,
                   "Share of each difference that is kept, of ties and dare")
      ->type_name("P");
  command->add_option("--seed", args->options.seed, "Of what dare draws at random")->type_name("N");
  add_write_options(*command, args->write);
  add_open_options(*command, args->open);
  add_json_flag(*command, chosen.json);
  command->callback(
      [args, &chosen] { chosen.action = [args, &chosen] { return merge(*args, chosen.json); }; });
}

}  // namespace loadstone::cli
