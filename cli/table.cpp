#include "cli/table.h"

#include <algorithm>
#include <array>

#include "loadstone/error.h"

namespace loadstone::cli {

namespace {

std::string one_line(std::string text) {
  std::ranges::replace(text, '\n', ' ');
  return text;
}

// The parser writes a choice as "{a,b,c}" behind the name of the value.
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

std::vector<std::string> names_of_codes() {
  std::vector<std::string> names;
  for (const CodeInfo& info : all_codes()) names.emplace_back(info.code);
  return names;
}

// The placeholder in the help says what a value is.
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

}  // namespace

std::vector<std::string> names_of_commands(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : commands_of(app)) names.push_back(command->get_name());
  return names;
}

CommandTable command_table(const CLI::App& app) {
  CommandTable table;
  table.help = one_line(app.get_description());
  for (const CLI::Option* option : app.get_options()) table.options.push_back(row_of(app, *option));
  for (const CLI::App* command : commands_of(app)) {
    CommandRow& row = table.commands.emplace_back();
    row.name = command->get_name();
    row.help = one_line(command->get_description());
    for (const CLI::Option* option : command->get_options()) {
      auto& rows = option->get_positional() ? row.positionals : row.options;
      rows.push_back(row_of(app, *option));
    }
  }
  return table;
}

}  // namespace loadstone::cli
