#include "cli/app.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "base/text.h"
#include "base/unknown_word.h"
#include "cli/commands.h"
#include "cli/exit_status.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/table.h"
#include "cli/voice.h"
#include "loadstone/error.h"
#include "loadstone/version.h"

namespace loadstone::cli {

namespace {

std::string footer() {
  std::string text = "Exit status: ";
  for (const ExitStatus& each : exit_statuses) {
    if (each.status == 4) text.back() = '\n';
    text += fmt::format("{} {}{}", each.status, each.meaning, each.status == 130 ? ".\n" : ", ");
  }
  return text +
         "'loadstone help COMMAND' tells a command's options; 'loadstone explain CODE' what an "
         "error "
         "means.";
}

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

// The options of the command that resemble an unknown one.
std::string nearest_options(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_subcommands().front()->get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  for (const std::string& word : app.remaining(true)) {
    if (!word.starts_with("--")) continue;
    std::string near = did_you_mean(word.substr(0, word.find('=')), names);
    if (!near.empty()) return near;
  }
  return {};
}

std::string usage_message(const CLI::App& app, const CLI::ParseError& problem) {
  std::string said = problem.what();
  if (app.get_subcommands().empty()) {
    const auto words = app.remaining();
    if (!words.empty()) return unknown_command(app, words.front()).message();
    said = "a command is needed: " + either(names_of_commands(app));
  } else {
    said += nearest_options(app);
  }
  std::ranges::replace(said, '\n', ' ');
  return said;
}

// An error that names an option as the library does ("max_memory"), with the word of the command.
Error with_option(const CLI::App& app, const Error& error) {
  std::string option = "--" + error.where().field;
  std::ranges::replace(option, '_', '-');
  const auto parsed = app.get_subcommands();
  const bool is_option = error.code() == "plan.options" && !parsed.empty() &&
                         parsed.front()->get_option_no_throw(option) != nullptr;
  if (!is_option) return error;
  Where where = error.where();
  where.field = std::move(option);
  return {error.code(), error.message(), std::move(where)};
}

int fail(const Error& error, bool json) {
  report_error(error, json);
  return exit_status(error.code());
}

// Every way in which an action can end has a status.
int guarded(const CLI::App& app, const Chosen& chosen) {
  try {
    set_voice(chosen.voice);
    const int status = chosen.action();
    finish_output();
    return status;
  } catch (const Error& error) {
    if (error.code() != "usage") return fail(with_option(app, error), chosen.json);
    return fail(usage_error(command_so_far(app), error.message(), error.where()), chosen.json);
  } catch (const std::bad_alloc&) {
    return fail(Error("memory.host", "the machine has not enough memory for this"), chosen.json);
  } catch (const std::exception& defect) {
    return fail(Error("internal", defect.what()), chosen.json);
  }
}

}  // namespace

Error unknown_command(const CLI::App& app, const std::string& typed) {
  return Error("usage", unknown_word("command", typed, names_of_commands(app)));
}

int run(int argc, const char* const* argv) {
  catch_interrupts(wants_json(argc, argv));  // first: Ctrl-C may come at once
  Chosen chosen;
  CLI::App app(
      "Says what a load of model weights will do before it reads one byte, does it, and proves it.",
      "loadstone");
  app.set_version_flag("--version", "loadstone " LOADSTONE_VERSION, "Print the version and exit");
  app.set_help_flag("-h,--help", "Print this help and exit");
  app.footer(footer());
  app.require_subcommand(1);
  add_inspect(app, chosen);
  add_plan(app, chosen);
  add_load(app, chosen);
  add_convert(app, chosen);
  add_merge(app, chosen);
  add_verify(app, chosen);
  add_bench(app, chosen);
  add_explain(app, chosen);
  add_help(app, chosen);
  add_completion(app, chosen);
  add_man(app, chosen);
  for (CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    add_voice_options(*command, chosen.voice);
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& asked) {  // --help, --version
    app.exit(asked);
    return 0;
  } catch (const CLI::ParseError& problem) {
    const Error error = usage_error(command_so_far(app), usage_message(app, problem));
    return fail(error, wants_json(argc, argv));
  }
  return guarded(app, chosen);
}

}  // namespace loadstone::cli
