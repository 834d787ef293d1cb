// Declares options that several commands share, and the values made from them.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/parser.h"
#include "cli/remote.h"
#include "loadstone/catalog.h"
#include "loadstone/defaults.h"
#include "loadstone/page.h"
#include "loadstone/plan.h"

namespace loadstone::cli {

// Options that open a checkpoint.
struct OpenArgs {
  std::vector<std::string> paths;
  bool allow_links = false;
  bool strict = false;
  std::uint32_t gguf_rank_max = OpenOptions{}.gguf_rank_max;
  RemoteArgs remote;

  [[nodiscard]] OpenOptions options() const;
};

// Adds the argument CHECKPOINT, whose words together form one checkpoint.
Option add_checkpoint(Command command, OpenArgs& args);
void add_open_options(Command command, OpenArgs& args);

[[nodiscard]] std::shared_ptr<const Catalog> open_paths(const OpenArgs& args);

// A path with an optional weight, such as "models/a:0.5". If the whole text is an existing path, it
// has no weight. Throws Error "usage".
struct Weighted {
  std::string path;
  float weight = 1;
};
[[nodiscard]] Weighted parse_weighted(const std::string& text);

// Options that name adapters to merge, as typed.
struct AdapterArgs {
  std::vector<std::string> adapters;
  std::vector<std::string> ignore;
  TiePolicy tie = MergeOptions{}.tie;

  // Opens the adapters and appends them to `checkpoints`. Throws Error "usage".
  [[nodiscard]] std::vector<MergeAdapter> open(
      const OpenArgs& how, std::vector<std::shared_ptr<const Catalog>>& checkpoints) const;
};
void add_adapter_options(Command command, AdapterArgs& args);

// Options that determine a plan, as typed.
struct PlanArgs {
  OpenArgs open;
  std::string skeleton_path;
  std::string rules_path;
  std::vector<std::string> strip_prefixes;
  std::string dtype;
  std::string device_map;
  std::vector<std::string> max_memory;
  std::string staging;
  AdapterArgs lora;
  PlanOptions options;  // options that are stored as typed
  std::string html_path;
};

// Adds and returns the group of options that determine a plan. None of them is allowed with a plan
// from a file.
Command add_plan_options(Command command, PlanArgs& args);

// Opens the checkpoint and plans. Throws Error "usage" for an invalid size, dtype or device map.
[[nodiscard]] Plan make_plan(const PlanArgs& args);

// Adds findings about this machine to a plan that is about to be shown or executed. The free memory
// is not compared if the user set a limit for cpu, which the plan itself enforces, or if a device
// map was computed to fit. A plan from a file records neither, so a limit replaces the free memory.
void compare_with_machine(Plan& plan, const PlanArgs& args, bool is_saved = false);

// Rules, or recipes for this checkpoint. One of the members is empty.
struct RulesOrRecipes {
  Rules rules;
  Recipes recipes;
};
[[nodiscard]] RulesOrRecipes read_rules(const std::string& path, const Catalog& catalog);

// Writes the HTML page if --html was typed. `loaded`: measurements of the load that ran the plan.
void write_page(const Plan& plan, const PlanArgs& args,
                const std::optional<LoadFigures>& loaded = {});

// Help text of --rules in all commands.
inline constexpr const char* rules_help =
    "How names and layouts map, as JSON: rules, or recipes that\nPython wrote; '-': standard input";

// Single options.
void add_json_flag(Command command, bool& json);
void add_threads_option(Command command, unsigned& threads, const std::string& help,
                        unsigned most = defaults::threads_max);
// The readers of a load.
void add_readers_option(Command command, unsigned& threads, const std::string& help);
void add_html_option(Command command, std::string& path);
// `help`: the text that names the object of the receipt; the function appends the kinds of digest.
void add_receipt_option(Command command, std::string& kind, const std::string& help);

// Returns " (default: TEXT)" for the end of an option's help.
[[nodiscard]] inline std::string default_text(const std::string& text) {
  return " (default: " + text + ")";
}

// Parses the typed value of an option. Throws Error "usage".
[[nodiscard]] std::uint64_t parse_size(std::string_view option, const std::string& text,
                                       std::uint64_t least = 0);
// Parses a dtype. `others`: other words that the option accepts, for the error message. Throws
// Error "usage".
[[nodiscard]] Dtype dtype_option(std::string_view option, const std::string& text,
                                 std::vector<std::string> others = {});

// Parses a device map, which is a word, a list "prefix=device,...", JSON text or the path of a JSON
// file.
[[nodiscard]] DeviceMap parse_device_map(const std::string& text);

}  // namespace loadstone::cli
