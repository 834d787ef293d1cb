// loadstone help, man and completion: print the parser's table of commands in other formats.
#include <memory>
#include <string>

#include "cli/app.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/output.h"
#include "cli/table.h"

namespace loadstone::cli {

namespace {

std::string completion(const CommandTable& table, const std::string& shell) {
  if (shell == "bash") return bash_completion(table);
  return shell == "zsh" ? zsh_completion(table) : fish_completion(table);
}

}  // namespace

void add_help(Program& program, Chosen&) {
  const Command command = program.add_subcommand("help", "Print the options of a command");
  const auto name = std::make_shared<std::string>();
  command.add_option("COMMAND", *name, "", "The same as 'loadstone COMMAND --help'");
  command.set_action([name, &program] {
    print(program.help_of(*name));
    return 0;
  });
}

void add_man(Program& program, Chosen&) {
  const Command command = program.add_subcommand("man", "Print the manual page, for 'man -l -'");
  command.set_action([&program] {
    print(man_page(program.table()));
    return 0;
  });
}

void add_completion(Program& program, Chosen&) {
  const Command command =
      program.add_subcommand("completion", "Print a script for completion in your shell");
  const auto shell = std::make_shared<std::string>();
  command.add_option("SHELL", *shell, "", "Your shell: eval \"$(loadstone completion bash)\"")
      .one_of({"bash", "zsh", "fish"})
      .required();
  command.set_action([shell, &program] {
    print(completion(program.table(), *shell));
    return 0;
  });
}

}  // namespace loadstone::cli
