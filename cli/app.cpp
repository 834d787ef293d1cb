#include "cli/app.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"
#include "cli/exit_status.h"
#include "cli/interrupt.h"
#include "cli/log.h"
#include "cli/output.h"
#include "cli/voice.h"
#include "loadstone/error.h"
#include "loadstone/version.h"

namespace loadstone::cli {

namespace {

std::string footer() {
  std::string text = "Exit status: ";
  for (const ExitStatus& each : exit_statuses) {
    if (each.status == 4 || each.status == 137) text.back() = '\n';
    text += fmt::format("{} {}{}", each.status, each.meaning, each.status == 137 ? ".\n" : ", ");
  }
  return text +
         "'loadstone help COMMAND' lists a command's options; 'loadstone explain CODE' explains an "
         "error.";
}

// Returns true if --json was typed. If parsing fails, the parser does not report this.
bool wants_json(int argc, const char* const* argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (word == "--") return false;
    if (word == "--json") return true;
  }
  return false;
}

// Returns the error with an option's name on the command line (--max-memory) instead of its name in
// the library (max_memory).
Error with_option(const Program& program, const Error& error) {
  std::string option = "--" + error.where().field;
  std::ranges::replace(option, '_', '-');
  if (error.code() != "plan.options" || !program.has_option(option)) return error;
  Where where = error.where();
  where.field = std::move(option);
  return {error.code(), error.message(), std::move(where)};
}

int fail(const Error& error, bool json) {
  report_error(error, json);
  return exit_status(error.code());
}

// Runs the command. Returns an exit status for every way in which the command can end.
int guarded(const Program& program, const Chosen& chosen, const std::string& arguments) {
  try {
    set_voice(chosen.voice);
    if (!chosen.voice.log_path.empty()) open_log(chosen.voice.log_path);
    print_and_log(false, [&](const TextStyle&) {
      return fmt::format("{}: begins with loadstone {} in process {}\nloadstone: arguments: {}\n",
                         program.command_so_far(), LOADSTONE_VERSION, ::getpid(), arguments);
    });
    const int status = program.run();
    finish_output();
    return status;
  } catch (const Error& error) {
    if (error.code() != "usage") return fail(with_option(program, error), chosen.json);
    return fail(usage_error(program.command_so_far(), error.message(), error.where()), chosen.json);
  } catch (const std::bad_alloc&) {
    return fail(Error("memory.host", "the machine does not have enough memory"), chosen.json);
  } catch (const std::exception& defect) {
    return fail(Error("internal", defect.what()), chosen.json);
  }
}

}  // namespace

int run(int argc, const char* const* argv) {
  catch_interrupts(wants_json(argc, argv));  // first, because Ctrl-C may come at any time
  Chosen chosen;
  Program program("loadstone",
                  "Plans, loads, converts, quantizes, merges and verifies model checkpoints.",
                  footer(), "loadstone " LOADSTONE_VERSION);
  add_inspect(program, chosen);
  add_plan(program, chosen);
  add_load(program, chosen);
  add_convert(program, chosen);
  add_merge(program, chosen);
  add_verify(program, chosen);
  add_bench(program, chosen);
  add_explain(program, chosen);
  add_help(program, chosen);
  add_completion(program, chosen);
  add_man(program, chosen);
  for (const Command& command : program.commands()) add_voice_options(command, chosen.voice);
  try {
    if (!program.parse(argc, argv)) return 0;
  } catch (const Error& error) {
    return fail(error, wants_json(argc, argv));
  }
  const int status = guarded(program, chosen, shown_arguments(argc, argv));
  print_and_log(false, [&](const TextStyle&) {
    const std::string_view signal = status == 130 ? first_signal() : "";
    return fmt::format("{}: exit status {}{}{}\n", program.command_so_far(), status,
                       signal.empty() ? "" : " after ", signal);
  });
  return status;
}

}  // namespace loadstone::cli
