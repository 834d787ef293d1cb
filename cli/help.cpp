// loadstone help, man and completion: what the parser knows of commands, in other forms.
#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "cli/app.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/output.h"
#include "cli/table.h"

namespace loadstone::cli {

namespace {

std::string completion(const CLI::App& app, const std::string& shell) {
  const CommandTable table = command_table(app);
  if (shell == "bash") return bash_completion(table);
  return shell == "zsh" ? zsh_completion(table) : fish_completion(table);
}

std::string help_of(const CLI::App& app, const std::string& name) {
  // help() of the program would be that of the command which is running.
  if (name.empty()) {
    return app.get_formatter()->make_help(&app, app.get_name(), CLI::AppFormatMode::Normal);
  }
  const auto named =
      app.get_subcommands([&](const CLI::App* command) { return command->get_name() == name; });
  if (named.empty()) throw unknown_command(app, name);
  return named.front()->help("loadstone");
}

}  // namespace

void add_help(CLI::App& app, Chosen& chosen) {
  auto* command = app.add_subcommand("help", "The options of a command");
  const auto name = std::make_shared<std::string>();
  command->add_option("COMMAND", *name, "As for 'loadstone COMMAND --help'")->type_name("");
  command->callback([name, &app, &chosen] {
    chosen.action = [name, &app] {
      print(help_of(app, *name));
      return 0;
    };
  });
}

void add_man(CLI::App& app, Chosen& chosen) {
  auto* command = app.add_subcommand("man", "The manual page, for 'man -l -'");
  command->callback([&app, &chosen] {
    chosen.action = [&app] {
      print(man_page(command_table(app)));
      return 0;
    };
  });
}

void add_completion(CLI::App& app, Chosen& chosen) {
  auto* command = app.add_subcommand("completion", "A script that completes words in your shell");
  const auto shell = std::make_shared<std::string>();
  command->add_option("SHELL", *shell, "Yours: eval \"$(loadstone completion bash)\"")
      ->type_name("")
      ->check(one_of({"bash", "zsh", "fish"}))
      ->required();
  command->callback([shell, &app, &chosen] {
    chosen.action = [shell, &app] {
      print(completion(app, *shell));
      return 0;
    };
  });
}

}  // namespace loadstone::cli
