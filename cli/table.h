// Declares the commands and their options as data, which Program::table() reads from the parser.
// The man page and the shell completions are generated from this table, so the parser is the only
// list of commands.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace loadstone::cli {

// Kind of word that a shell completes.
enum class WordKind { text, file, folder, choice };

struct WordRow {
  std::vector<std::string> names;  // "-o", "--output"; for a positional argument "CHECKPOINT"
  std::string value;               // "FILE"; empty for a flag
  WordKind kind = WordKind::text;
  // One line of help.
  std::vector<std::string> choices;
  std::string help;  // one line

  [[nodiscard]] bool takes_value() const noexcept { return !value.empty(); }
};

struct CommandRow {
  std::string name;
  std::string help;
  std::vector<WordRow> positionals;
  std::vector<WordRow> options;
};

struct CommandTable {
  std::string help;  // help text of the program
  std::vector<WordRow> options;
  std::vector<CommandRow> commands;
};

// Returns the output of `loadstone man`: loadstone(1), in the man macros of roff.
[[nodiscard]] std::string man_page(const CommandTable& table);

// Return scripts that define the completion for a shell.
[[nodiscard]] std::string bash_completion(const CommandTable& table);
[[nodiscard]] std::string zsh_completion(const CommandTable& table);
[[nodiscard]] std::string fish_completion(const CommandTable& table);

}  // namespace loadstone::cli
