// Generates shell completions from the table of commands.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <string>
#include <string_view>

#include "cli/table.h"

namespace loadstone::cli {

namespace {

std::string spaced(const std::vector<std::string>& words) {
  return fmt::format("{}", fmt::join(words, " "));
}

// Returns the text with `escape` inserted before each of these characters.
std::string escaped(std::string_view text, std::string_view characters, std::string_view escape) {
  std::string out;
  for (const char character : text) {
    if (characters.find(character) != characters.npos) out += escape;
    out += character;
  }
  return out;
}

// Returns the text in single quotes for bash and zsh: '\'' ends the quotes, adds a quote and starts
// them again.
std::string in_quotes(std::string_view text) { return "'" + escaped(text, "'", "'\\'") + "'"; }

// Returns the text in single quotes for fish, which has two escapes inside single quotes.
std::string in_fish_quotes(std::string_view text) { return "'" + escaped(text, "'\\", "\\") + "'"; }

// A shell's action for each kind of word, in the order of WordKind.
using Actions = std::array<std::string, 4>;

// ---- bash

// Returns the command that sets COMPREPLY for a word of this kind. Completions are one per line,
// because file names may contain spaces.
std::string bash_reply(const WordRow& row) {
  return Actions{":", "_loadstone_files -f", "_loadstone_files -d",
                 fmt::format("mapfile -t COMPREPLY < <(compgen -W {} -- \"$cur\")",
                             in_quotes(spaced(row.choices)))}[static_cast<std::size_t>(row.kind)];
}

std::string bash_command(const CommandRow& command) {
  std::string text = fmt::format("    {})\n      case \"$prev\" in\n", command.name);
  std::vector<std::string> names;
  for (const WordRow& row : command.options) {
    names.insert(names.end(), row.names.begin(), row.names.end());
    if (!row.takes_value()) continue;
    text += fmt::format("        {}) {}; return ;;\n", fmt::join(row.names, "|"), bash_reply(row));
  }
  text += fmt::format("      esac\n      options={}\n", in_quotes(spaced(names)));
  text += "      if [[ $cur != -* ]]; then ";
  text += command.positionals.empty() ? ":" : bash_reply(command.positionals.back());
  return text + "; return; fi ;;\n";
}

// ---- zsh

// Escapes a colon and brackets, which have a special meaning in specifications of _arguments.
std::string zsh_text(std::string_view text) { return escaped(text, ":[]", "\\"); }

std::string zsh_action(const WordRow& row) {
  return Actions{" ", "_files", "_files -/",
                 "(" + spaced(row.choices) + ")"}[static_cast<std::size_t>(row.kind)];
}

// Adds each name of an option as a separate and repeatable specification, because many options may
// be repeated.
void add_zsh_option(std::string& text, const WordRow& row) {
  for (const std::string& name : row.names) {
    std::string spec = "*" + name;
    if (row.takes_value() && name.starts_with("--")) spec += '=';
    spec += "[" + zsh_text(row.help) + "]";
    if (row.takes_value()) spec += ":" + zsh_text(row.value) + ":" + zsh_action(row);
    text += " \\\n        " + in_quotes(spec);
  }
}

std::string zsh_command(const CommandRow& command) {
  std::string text = fmt::format("    {})\n      _arguments -s", command.name);
  for (const WordRow& row : command.options) add_zsh_option(text, row);
  if (!command.positionals.empty()) {
    const WordRow& row = command.positionals.back();
    text += " \\\n        " + in_quotes("*:" + row.value + ":" + zsh_action(row));
  }
  return text + " ;;\n";
}

// ---- fish

std::string fish_action(const WordRow& row) {
  return Actions{
      row.takes_value() ? " -x" : "", " -r -F", " -x -a '(__fish_complete_directories)'",
      " -x -a " + in_fish_quotes(spaced(row.choices))}[static_cast<std::size_t>(row.kind)];
}

void add_fish_option(std::string& text, const std::string& condition, const WordRow& row) {
  text += "complete -c loadstone" + condition;
  for (const std::string& name : row.names) {
    text += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
  }
  text += fish_action(row) + " -d " + in_fish_quotes(row.help) + '\n';
}

}  // namespace

std::string bash_completion(const CommandTable& table) {
  std::vector<std::string> names;
  for (const CommandRow& command : table.commands) names.push_back(command.name);
  std::vector<std::string> options;
  for (const WordRow& row : table.options) {
    options.insert(options.end(), row.names.begin(), row.names.end());
  }
  std::string text =
      "# bash completion of loadstone, made by 'loadstone completion bash'.\n"
      "_loadstone_files() {\n"
      "  compopt -o filenames 2>/dev/null\n"
      "  mapfile -t COMPREPLY < <(compgen \"$1\" -- \"$cur\")\n"
      "}\n"
      "_loadstone() {\n"
      "  local cur=${COMP_WORDS[COMP_CWORD]} prev= command= options= i\n"
      "  COMPREPLY=()\n"
      "  ((COMP_CWORD > 0)) && prev=${COMP_WORDS[COMP_CWORD - 1]}\n"
      "  # bash takes --option=value for three words.\n"
      "  if [[ $cur == = ]]; then\n"
      "    cur=\n"
      "  elif [[ $prev == = ]] && ((COMP_CWORD > 1)); then\n"
      "    prev=${COMP_WORDS[COMP_CWORD - 2]}\n"
      "  fi\n"
      "  for ((i = 1; i < COMP_CWORD; i++)); do\n"
      "    if [[ ${COMP_WORDS[i]} != -* ]]; then command=${COMP_WORDS[i]}; break; fi\n"
      "  done\n"
      "  case \"$command\" in\n";
  text += fmt::format("    '') options={} ;;\n", in_quotes(spaced(names) + " " + spaced(options)));
  for (const CommandRow& command : table.commands) text += bash_command(command);
  return text +
         "  esac\n"
         "  mapfile -t COMPREPLY < <(compgen -W \"$options\" -- \"$cur\")\n"
         "}\n"
         "complete -F _loadstone loadstone\n";
}

std::string zsh_completion(const CommandTable& table) {
  std::string text =
      "#compdef loadstone\n"
      "# zsh completion of loadstone, made by 'loadstone completion zsh'.\n"
      "_loadstone() {\n"
      "  local context state state_descr line\n"
      "  local -a commands\n"
      "  typeset -A opt_args\n"
      "  commands=(\n";
  for (const CommandRow& command : table.commands) {
    text += "    " + in_quotes(command.name + ":" + zsh_text(command.help)) + '\n';
  }
  text += "  )\n  _arguments -C";
  for (const WordRow& row : table.options) add_zsh_option(text, row);
  text +=
      " \\\n        '1:COMMAND:->command' '*::argument:->argument' && return\n"
      "  if [[ $state == command ]]; then _describe -t commands COMMAND commands; return; fi\n"
      "  case $words[1] in\n";
  for (const CommandRow& command : table.commands) text += zsh_command(command);
  // If zsh autoloads the file from fpath, the file is the body of the function. If the file is
  // sourced, it only registers the function.
  return text +
         "  esac\n"
         "}\n"
         "if [[ $funcstack[1] == _loadstone ]]; then\n"
         "  _loadstone \"$@\"\n"
         "elif (( $+functions[compdef] )); then\n"
         "  compdef _loadstone loadstone\n"
         "fi\n";
}

std::string fish_completion(const CommandTable& table) {
  std::string text =
      "# fish completion of loadstone, made by 'loadstone completion fish'.\n"
      "complete -c loadstone -n __fish_use_subcommand -f\n";
  for (const WordRow& row : table.options) {
    add_fish_option(text, " -n __fish_use_subcommand", row);
  }
  for (const CommandRow& command : table.commands) {
    text += fmt::format("complete -c loadstone -n __fish_use_subcommand -a {} -d {}\n",
                        command.name, in_fish_quotes(command.help));
  }
  for (const CommandRow& command : table.commands) {
    const std::string condition = fmt::format(" -n '__fish_seen_subcommand_from {}'", command.name);
    for (const WordRow& row : command.options) add_fish_option(text, condition, row);
    for (const WordRow& row : command.positionals) {
      if (row.kind == WordKind::file) continue;  // fish completes files by default
      text += fmt::format("complete -c loadstone{} -f -a {} -d {}\n", condition,
                          in_fish_quotes(spaced(row.choices)), in_fish_quotes(row.help));
    }
  }
  return text;
}

}  // namespace loadstone::cli
