// The commands and their options as data, which Program::table() reads from the parser: the man
// page and the completions of shells are made of it, so that the parser is the only list.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace loadstone::cli {

// The kind of word that a shell completes.
enum class WordKind { text, file, folder, choice };

struct WordRow {
  std::vector<std::string> names;  // "-o", "--output"; of a positional: "CHECKPOINT"
  std::string value;               // "FILE"; empty for a flag
  WordKind kind = WordKind::text;
  std::vector<std::string> choices;  // of a choice
  std::string help;                  // one line

  [[nodiscard]] bool takes_value() const noexcept { return !value.empty(); }
};

struct CommandRow {
  std::string name;
  std::string help;
  std::vector<WordRow> positionals;
  std::vector<WordRow> options;
};

struct CommandTable {
  std::string help;  // of the program
  std::vector<WordRow> options;
  std::vector<CommandRow> commands;
};

// Returns the output of `loadstone man`: loadstone(1), in the man macros of roff.
[[nodiscard]] std::string man_page(const CommandTable& table);

// Scripts that a shell reads.
[[nodiscard]] std::string bash_completion(const CommandTable& table);
[[nodiscard]] std::string zsh_completion(const CommandTable& table);
[[nodiscard]] std::string fish_completion(const CommandTable& table);

}  // namespace loadstone::cli
