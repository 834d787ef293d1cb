// Generates the man page loadstone(1) from the table of commands.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <string_view>

#include "cli/exit_status.h"
#include "cli/table.h"
#include "loadstone/version.h"

namespace loadstone::cli {

namespace {

// Escapes text for roff, so that it contains no roff escapes or requests, and so that hyphens can
// be copied.
std::string roff(std::string_view text) {
  std::string out;
  for (const char character : text) {
    if (character == '\\') {
      out += "\\e";
    } else if (character == '-') {
      out += "\\-";
    } else {
      if (out.empty() && (character == '.' || character == '\'')) out += "\\&";
      out += character;
    }
  }
  return out;
}

void add_row(std::string& page, const WordRow& row) {
  page += ".TP\n";
  const char* separator = "";
  for (const std::string& name : row.names) {
    page += fmt::format("{}\\fB{}\\fR", separator, roff(name));
    separator = ", ";
  }
  if (row.names.front().starts_with('-') && row.takes_value()) {
    page += fmt::format(" \\fI{}\\fR", roff(row.value));
  }
  page += '\n' + roff(row.help) + '\n';
  // Lists the choices of options only. `loadstone explain` lists the choices of its argument.
  if (row.kind == WordKind::choice && row.names.front().starts_with('-')) {
    page += roff(fmt::format("One of {}.", fmt::join(row.choices, ", "))) + '\n';
  }
}

void add_command(std::string& page, const CommandRow& command) {
  std::string synopsis = command.name;
  for (const WordRow& row : command.positionals) synopsis += ' ' + row.names.front();
  page += fmt::format(".SS loadstone {}\n{}.\n", roff(synopsis), roff(command.help));
  for (const WordRow& row : command.positionals) add_row(page, row);
  for (const WordRow& row : command.options) add_row(page, row);
}

}  // namespace

std::string man_page(const CommandTable& table) {
  std::string page = fmt::format(
      ".TH LOADSTONE 1 \"\" \"loadstone {}\" \"User Commands\"\n"
      ".SH NAME\nloadstone \\- load, convert, merge and verify the weights of models\n"
      ".SH SYNOPSIS\n.B loadstone\n.I COMMAND\n.RI [ OPTION ]...\n"
      ".SH DESCRIPTION\n{}\n.SH OPTIONS\n",
      roff(LOADSTONE_VERSION), roff(table.help));
  for (const WordRow& row : table.options) add_row(page, row);
  page += ".SH COMMANDS\n";
  for (const CommandRow& command : table.commands) add_command(page, command);
  page += ".SH EXIT STATUS\n";
  for (const ExitStatus& each : exit_statuses) {
    page += fmt::format(".TP\n.B {}\n{}\n", each.status, roff(each.meaning));
  }
  return page;
}

}  // namespace loadstone::cli
