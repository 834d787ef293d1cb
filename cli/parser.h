// Parses the command line. Only parser.cpp includes CLI11, because it takes seconds to compile.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/named.h"
#include "cli/table.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace loadstone::cli {

// Handle of an option. The program owns the option.
class Option {
 public:
  explicit Option(CLI::Option* option) : option_(option) {}

  Option required() const;
  Option needs(Option other) const;
  Option excludes(Option other) const;
  // Makes the help show an option with a list as if the option took one value.
  Option shown_once() const;
  Option one_of(std::vector<std::string> words) const;
  template <typename Number>
  Option in_range(Number least, Number most, const std::string& shown = {}) const;

 private:
  CLI::Option* option_;
};

// Handle of a command, or of a group of its options. The program owns the command.
class Command {
 public:
  Command(CLI::App* app, std::function<int()>* chosen) : app_(app), chosen_(chosen) {}

  // Returns a group: the help shows its options under this heading.
  [[nodiscard]] Command in_group(const std::string& heading) const;
  // Adds an option that stores its value in `value` during parsing; until then `value` must have
  // the default. The help calls the value `type`. An option with a list takes one word each time it
  // is typed, because otherwise it would consume the arguments that follow.
  template <typename Value>
  Option add_option(const std::string& names, Value& value, const std::string& type,
                    const std::string& help) const;
  // Adds an option whose value is the name of an enumerator; `words` are the allowed names.
  template <typename Enum>
  Option add_choice(const std::string& names, Enum& value, const std::string& type,
                    const std::string& help,
                    std::vector<std::string> words = names_of<Enum>()) const {
    const auto set = [&value](const std::string& word) { value = from_name<Enum>(word).value(); };
    return add_word(names, set, type, help).one_of(std::move(words));
  }
  Option add_flag(const std::string& names, bool& value, const std::string& help) const;
  // Sets the function that runs the command. It returns the exit status, and throws for failures.
  void set_action(std::function<int()> action) const;
  // Returns the names of the options in this group that were typed.
  [[nodiscard]] std::vector<std::string> typed_options() const;

 private:
  Option add_word(const std::string& names, std::function<void(const std::string&)> set,
                  const std::string& type, const std::string& help) const;

  CLI::App* app_;
  std::function<int()>* chosen_;
  std::string group_ = "Options";
};

// The program with its commands. Not thread-safe.
class Program {
 public:
  Program(const std::string& name, const std::string& help, const std::string& footer,
          const std::string& version);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  Command add_subcommand(const std::string& name, const std::string& help);
  [[nodiscard]] const std::vector<Command>& commands() const noexcept { return commands_; }

  // Parses the arguments. Returns false if help or the version was requested, after printing it.
  // Throws Error "usage".
  [[nodiscard]] bool parse(int argc, const char* const* argv);
  // Runs the command that was typed.
  [[nodiscard]] int run() const { return chosen_(); }
  // Returns "loadstone plan" if the typed words name a command, otherwise "loadstone".
  [[nodiscard]] std::string command_so_far() const;
  // Returns true if the command that was typed has this option.
  [[nodiscard]] bool has_option(const std::string& name) const;

  [[nodiscard]] CommandTable table() const;
  // Returns the help of a command, or of the program if `command` is empty. Throws Error "usage".
  [[nodiscard]] std::string help_of(const std::string& command) const;

 private:
  std::unique_ptr<CLI::App> app_;
  std::vector<Command> commands_;
  std::function<int()> chosen_;
};

}  // namespace loadstone::cli
