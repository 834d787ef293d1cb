#include "cli/parser.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>

#include "base/text.h"
#include "base/unknown_word.h"
#include "cli/output.h"
#include "loadstone/error.h"

namespace loadstone::cli {

namespace {

using Words = std::vector<std::string>;

std::string one_line(std::string text) {
  std::ranges::replace(text, '\n', ' ');
  return text;
}

// Returns the choices of an option, which the parser writes as "{a,b,c}" after the name of the
// value.
std::vector<std::string> choices_of(const std::string& type) {
  std::vector<std::string> choices;
  const auto begin = type.find(":{");
  if (begin == std::string::npos) return choices;
  std::string_view left = std::string_view(type).substr(begin + 2);
  left = left.substr(0, left.find('}'));
  while (!left.empty()) {
    const auto comma = std::min(left.find(','), left.size());
    choices.emplace_back(left.substr(0, comma));
    left.remove_prefix(std::min(comma + 1, left.size()));
  }
  return choices;
}

std::vector<const CLI::App*> commands_of(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

std::vector<std::string> names_of_commands(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : commands_of(app)) names.push_back(command->get_name());
  return names;
}

std::vector<std::string> names_of_codes() {
  std::vector<std::string> names;
  for (const CodeInfo& info : all_codes()) names.emplace_back(info.code);
  return names;
}

// Returns the kind of value that the placeholder in the help implies.
WordKind kind_of(std::string_view value) {
  static constexpr std::array files = {"FILE", "PATH",   "ADAPTER", "TARGET", "CHECKPOINT",
                                       "M",    "SOURCE", "MODEL",   "A",      "B"};
  if (value == "DIR") return WordKind::folder;
  return std::ranges::find(files, value) == files.end() ? WordKind::text : WordKind::file;
}

WordRow row_of(const CLI::App& app, const CLI::Option& option) {
  WordRow row;
  row.help = one_line(option.get_description());
  const std::string type = option.get_type_name();
  row.choices = choices_of(type);
  if (option.get_positional()) {
    row.names = {option.get_name(true)};
    row.value = row.names.front();
    if (row.value == "CODE") row.choices = names_of_codes();
    if (row.value == "COMMAND") row.choices = names_of_commands(app);
  } else {
    for (const std::string& name : option.get_snames()) row.names.push_back("-" + name);
    for (const std::string& name : option.get_lnames()) row.names.push_back("--" + name);
    if (option.get_items_expected_max() > 0) row.value = type.substr(0, type.find(':'));
  }
  row.kind = row.choices.empty() ? kind_of(row.value) : WordKind::choice;
  return row;
}

// Words that users try as commands, each with the right command.
constexpr std::array<std::pair<std::string_view, std::string_view>, 5> typed_elsewhere = {
    {{"doctor", "python -m loadstone doctor"},
     {"export-rules", "python -m loadstone export-rules"},
     {"version", "loadstone --version"},
     {"-V", "loadstone --version"},
     {"-v", "loadstone --version"}}};

// Returns an error that names the commands similar to the word, or all commands if none is similar.
Error unknown_command(const CLI::App& app, const std::string& typed) {
  for (const auto& [word, command] : typed_elsewhere) {
    if (typed != word) continue;
    return Error("usage", fmt::format("unknown command '{}'; did you mean '{}'?", word, command));
  }
  return Error("usage", unknown_word("command", typed, names_of_commands(app)));
}

// Options of `python -m loadstone convert` and `verify`, which this command lacks.
constexpr std::array<std::string_view, 2> python_options = {"--converter", "--trust-code"};

// Returns the command that has an unknown option, or the options that resemble it.
std::string nearest_options(const CLI::App& app) {
  const std::string command = app.get_subcommands().front()->get_name();
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_subcommands().front()->get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  for (const std::string& word : app.remaining(true)) {
    if (!word.starts_with("--")) continue;
    const auto name = std::string_view(word).substr(0, word.find('='));
    const bool is_of_python = std::ranges::find(python_options, name) != python_options.end();
    if (is_of_python && (command == "convert" || command == "verify")) {
      return fmt::format("; {} is an option of the Python command: 'python -m loadstone {}'", name,
                         command);
    }
    std::string near = did_you_mean(name, names);
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
  return one_line(std::move(said));
}

}  // namespace

Option Option::required() const { return Option(option_->required()); }
Option Option::needs(Option other) const { return Option(option_->needs(other.option_)); }
Option Option::excludes(Option other) const { return Option(option_->excludes(other.option_)); }
Option Option::shown_once() const { return Option(option_->expected(1)); }

Option Option::one_of(std::vector<std::string> words) const {
  // The description has the format of CLI::IsMember.
  std::string described = fmt::format("{{{}}}", fmt::join(words, ","));
  const auto check = [words = std::move(words)](const std::string& typed) {
    const bool is_known = std::ranges::find(words, typed) != words.end();
    return is_known ? std::string() : unknown_word("value", typed, words);
  };
  return Option(option_->check(CLI::Validator(check, std::move(described))));
}

template <typename Number>
Option Option::in_range(Number least, Number most, const std::string& shown) const {
  return Option(option_->check(CLI::Range(least, most, shown)));
}
template Option Option::in_range(unsigned, unsigned, const std::string&) const;
template Option Option::in_range(double, double, const std::string&) const;

Command Command::in_group(const std::string& heading) const {
  Command command = *this;
  command.group_ = heading;
  return command;
}

template <typename Value>
Option Command::add_option(const std::string& names, Value& value, const std::string& type,
                           const std::string& help) const {
  CLI::Option* const option = app_->add_option(names, value, help)->type_name(type)->group(group_);
  if (std::is_same_v<Value, Words> && names.starts_with('-')) {
    option->allow_extra_args(false)->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  }
  return Option(option);
}
#define LOADSTONE_OPTION(Value)                                                       \
  template Option Command::add_option(const std::string&, Value&, const std::string&, \
                                      const std::string&) const;
LOADSTONE_OPTION(std::string)
LOADSTONE_OPTION(Words)
LOADSTONE_OPTION(unsigned)
LOADSTONE_OPTION(double)
LOADSTONE_OPTION(std::optional<float>)
LOADSTONE_OPTION(std::optional<double>)
LOADSTONE_OPTION(std::optional<std::uint64_t>)
#undef LOADSTONE_OPTION

Option Command::add_word(const std::string& names, std::function<void(const std::string&)> set,
                         const std::string& type, const std::string& help) const {
  return Option(app_->add_option_function(names, set, help)->type_name(type)->group(group_));
}

Option Command::add_flag(const std::string& names, bool& value, const std::string& help) const {
  return Option(app_->add_flag(names, value, help)->group(group_));
}

Words Command::typed_options() const {
  Words names;
  for (const CLI::Option* option : app_->get_options()) {
    if (option->count() > 0 && option->get_group() == group_) names.push_back(option->get_name());
  }
  return names;
}

void Command::set_action(std::function<int()> action) const {
  app_->callback([to = chosen_, action = std::move(action)] { *to = action; });
}

Program::Program(const std::string& name, const std::string& help, const std::string& footer,
                 const std::string& version)
    : app_(std::make_unique<CLI::App>(help, name)) {
  app_->set_version_flag("--version", version, "Print the version and exit");
  app_->set_help_flag("-h,--help", "Print this help and exit");
  app_->footer(footer);
  app_->require_subcommand(1);
}

Program::~Program() = default;

Command Program::add_subcommand(const std::string& name, const std::string& help) {
  return commands_.emplace_back(app_->add_subcommand(name, help), &chosen_);
}

bool Program::parse(int argc, const char* const* argv) {
  try {
    app_->parse(argc, argv);
  } catch (const CLI::Success& asked) {
    app_->exit(asked);
    return false;
  } catch (const CLI::ParseError& problem) {
    throw usage_error(command_so_far(), usage_message(*app_, problem));
  }
  return true;
}

std::string Program::command_so_far() const {
  const auto parsed = app_->get_subcommands();
  return parsed.empty() ? "loadstone" : "loadstone " + parsed.front()->get_name();
}

bool Program::has_option(const std::string& name) const {
  const auto parsed = app_->get_subcommands();
  return !parsed.empty() && parsed.front()->get_option_no_throw(name) != nullptr;
}

CommandTable Program::table() const {
  CommandTable table;
  table.help = one_line(app_->get_description());
  for (const CLI::Option* option : app_->get_options()) {
    table.options.push_back(row_of(*app_, *option));
  }
  for (const CLI::App* command : commands_of(*app_)) {
    CommandRow& row = table.commands.emplace_back();
    row.name = command->get_name();
    row.help = one_line(command->get_description());
    for (const CLI::Option* option : command->get_options()) {
      auto& rows = option->get_positional() ? row.positionals : row.options;
      rows.push_back(row_of(*app_, *option));
    }
  }
  return table;
}

std::string Program::help_of(const std::string& command) const {
  // The program's help() would print the help of the command that is running.
  if (command.empty()) {
    return app_->get_formatter()->make_help(app_.get(), app_->get_name(),
                                            CLI::AppFormatMode::Normal);
  }
  const auto named =
      app_->get_subcommands([&](const CLI::App* each) { return each->get_name() == command; });
  if (named.empty()) throw unknown_command(*app_, command);
  return named.front()->help("loadstone");
}

}  // namespace loadstone::cli
