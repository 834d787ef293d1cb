#include "cli/app.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <new>
#include <string>
#include <string_view>

#include "base/text.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "loadstone/error.h"
#include "loadstone/version.h"

namespace loadstone::cli {

namespace {

constexpr const char* footer =
    "Exit status: 0 done, 1 done and found something, 2 wrong usage, 3 bad or unsupported file,\n"
    "4 input/output, 5 does not fit in memory, 130 interrupted.\n"
    "'loadstone COMMAND --help' tells a command's options; 'loadstone explain CODE' what an error "
    "means.";

// Where parsing fails, the parser does not say whether it has met --json by then.
bool wants_json(int argc, const char* const* argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == "--") return false;
    if (word == "--json") return true;
  }
  return false;
}

// "loadstone plan" where the words name a command, else "loadstone".
std::string command_so_far(const CLI::App& app) {
  const auto parsed = app.get_subcommands();
  return parsed.empty() ? "loadstone" : "loadstone " + parsed.front()->get_name();
}

std::string usage_message(const CLI::App& app, const CLI::ParseError& problem) {
  static constexpr const char* commands = "inspect, plan, load, convert, merge, verify or explain";
  std::string said = problem.what();
  if (app.get_subcommands().empty()) {
    const auto words = app.remaining();
    said = words.empty() ? fmt::format("a command is needed: {}", commands)
                         : fmt::format("'{}' is no command; one of {} is needed",
                                       printable(words.front()), commands);
  }
  std::ranges::replace(said, '\n', ' ');
  return said;
}

int fail(const Error& error, bool json) {
  report_error(error, json);
  return exit_status(error.code());
}

// Every way in which an action can end has a status.
int guarded(const Chosen& chosen, const std::string& command) {
  try {
    const int status = chosen.action();
    finish_output();
    return status;
  } catch (const Error& error) {
    if (error.code() != "usage") return fail(error, chosen.json);
    return fail(usage_error(command, error.message(), error.where()), chosen.json);
  } catch (const std::bad_alloc&) {
    return fail(Error("memory.host", "the machine has not enough memory for this"), chosen.json);
  } catch (const std::exception& defect) {
    return fail(Error("internal", defect.what()), chosen.json);
  }
}

}  // namespace

int run(int argc, const char* const* argv) {
  catch_interrupts(wants_json(argc, argv));  // first: Ctrl-C may come at once
  Chosen chosen;
  CLI::App app(
      "Says what a load of model weights will do before it reads one byte, does it, and proves it.",
      "loadstone");
  app.set_version_flag("--version", "loadstone " LOADSTONE_VERSION, "Print the version and exit");
  app.set_help_flag("-h,--help", "Print this help and exit");
  app.footer(footer);
  app.require_subcommand(1);
  add_inspect(app, chosen);
  add_plan(app, chosen);
  add_load(app, chosen);
  add_convert(app, chosen);
  add_merge(app, chosen);
  add_verify(app, chosen);
  add_explain(app, chosen);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& asked) {  // --help, --version
    app.exit(asked);
    return 0;
  } catch (const CLI::ParseError& problem) {
    const Error error = usage_error(command_so_far(app), usage_message(app, problem));
    return fail(error, wants_json(argc, argv));
  }
  return guarded(chosen, command_so_far(app));
}

}  // namespace loadstone::cli
