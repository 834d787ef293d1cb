#include "cli/voice.h"

#include <unistd.h>

#include <cstdlib>
#include <string_view>

#include "cli/options.h"

namespace loadstone::cli {

namespace {

Voice& current() noexcept {
  static Voice voice;
  return voice;
}

std::string_view variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? std::string_view() : std::string_view(value);
}

}  // namespace

void add_voice_options(Command command, Voice& voice) {
  const Command group = command.in_group("Messages");
  const Option quiet = group.add_flag("-q,--quiet", voice.quiet,
                                      "Print only errors: no progress, warnings, hints or reports");
  group.add_flag("-v,--verbose", voice.verbose, "Print all warnings, and what to do about errors")
      .excludes(quiet);
  group
      .add_option("--color", voice.color, "WHEN",
                  "Colours: auto (default; on a terminal, unless NO_COLOR is set), always or never")
      .one_of({"auto", "always", "never"});
}

void set_voice(const Voice& voice) { current() = voice; }
bool is_quiet() noexcept { return current().quiet; }
bool is_verbose() noexcept { return current().verbose; }

bool is_terminal(std::FILE* stream) {
  const std::string_view type = variable("TERM");
  return ::isatty(::fileno(stream)) != 0 && !type.empty() && type != "dumb";
}

TextStyle style_of(std::FILE* stream) {
  if (current().color != "auto") return {.is_coloured = current().color == "always"};
  return {.is_coloured = variable("NO_COLOR").empty() && is_terminal(stream)};
}

}  // namespace loadstone::cli
