// Declares the options and the work that convert and merge share: both write a checkpoint.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cli/parser.h"
#include "cli/quantize.h"
#include "loadstone/catalog.h"
#include "loadstone/convert.h"

namespace loadstone::cli {

// Options for writing a checkpoint, as typed.
struct WriteArgs {
  std::string target;
  std::string rules_path;
  std::string dtype;
  std::string block_dtype;
  std::string metadata_path;
  std::string architecture;
  std::string shard_size;
  std::string name;
  std::string max_memory;
  ConvertOptions options;  // options that are stored as typed
  std::string part;
  std::string receipt;
  ConvertRun run;
  bool dry_run = false;
  bool tensors = false;
  QuantizeArgs quantize;
};

void add_write_options(Command command, WriteArgs& args);

// Options of conversions that a merge does not have.
void add_rules_option(Command command, WriteArgs& args);
void add_layout_options(Command command, WriteArgs& args);

// Adds the options of a conversion without merges that change the tensors' names or values. Returns
// the groups of these options.
std::vector<Command> add_conversion_options(Command command, WriteArgs& args);

// Checks the options. Call before opening any file. Throws Error "usage", and "convert.target" for
// a target with the suffix of a different format.
void check_write(const WriteArgs& args);

// Returns the options for a conversion, without merges. `source`: the folder of
// `catalog`, whose companion files are copied. Throws Error "usage".
[[nodiscard]] ConvertOptions write_options(const WriteArgs& args, const std::string& source,
                                           const Catalog& catalog);

// Plans the conversion, and runs it or shows the plan. Returns the exit status.
[[nodiscard]] int write_checkpoint(const std::shared_ptr<const Catalog>& catalog,
                                   const ConvertOptions& options, const WriteArgs& args,
                                   bool is_strict, bool json);

}  // namespace loadstone::cli
