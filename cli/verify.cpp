// loadstone verify: the values of a checkpoint, or two checkpoints tensor by tensor.
#include "loadstone/verify.h"

#include <memory>
#include <string>
#include <vector>

#include "base/finding_json.h"
#include "base/json_writer.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/options.h"
#include "cli/output.h"
#include "cli/progress.h"
#include "loadstone/catalog.h"

namespace loadstone::cli {

namespace {

struct Args {
  OpenArgs open;  // its paths are not used: each of the two is a checkpoint
  std::string first;
  std::string second;
  unsigned threads = 0;
};

VerifyReport read_all(const Catalog& first, const Catalog* second, unsigned threads) {
  const InterruptibleWork work;
  WorkWatch watch;
  VerifyOptions options;
  options.threads = threads;
  options.observer = &watch;
  return second == nullptr ? verify_values(first, options) : compare(first, *second, options);
}

// The report's own members, and what opening the checkpoints had to say.
std::string json_of(const VerifyReport& report, const std::vector<Finding>& warnings) {
  JsonWriter json(2);
  json.begin_object();
  write_findings(json, warnings, "warnings");
  return joined(std::move(json), to_json(report));
}

int verify(const Args& args, bool json) {
  const auto first = open_checkpoint(args.first, args.open.options());
  const auto second = args.second.empty() ? std::shared_ptr<const Catalog>()
                                          : open_checkpoint(args.second, args.open.options());
  std::vector<Finding> warnings = first->findings();
  if (second) warnings.insert(warnings.end(), second->findings().begin(), second->findings().end());
  if (!json) print_warnings(warnings);
  const VerifyReport report = read_all(*first, second.get(), args.threads);
  print_line(json ? json_of(report, warnings) : to_table(report));
  if (has_errors(report.findings)) return 3;
  if (!report.ok()) return 1;
  return args.open.strict && has_warnings(warnings) ? 3 : 0;
}

}  // namespace

void add_verify(CLI::App& app, Chosen& chosen) {
  auto* command = app.add_subcommand("verify", "Structure and values of one; or compare two");
  const auto args = std::make_shared<Args>();
  command->add_option("A", args->first, "A file, a folder, an index, or a pattern in quotes")
      ->type_name("")
      ->required();
  command->add_option("B", args->second, "Another one, to be compared tensor by tensor")
      ->type_name("");
  add_threads_option(*command, args->threads, "Readers", defaults::verify_threads_max);
  add_open_options(*command, args->open);
  add_json_flag(*command, chosen.json);
  command->callback(
      [args, &chosen] { chosen.action = [args, &chosen] { return verify(*args, chosen.json); }; });
}

}  // namespace loadstone::cli
