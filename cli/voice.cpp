#include "cli/voice.h"

#include <unistd.h>

#include <cstdlib>
#include <string_view>

#include "base/named.h"
#include "cli/options.h"
#include "loadstone/error.h"

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

std::string_view name(ProgressForm form) noexcept {
  return name_among({"auto", "plain", "json"}, form);
}

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

void add_progress_options(Command command, Voice& voice) {
  const Command group = command.in_group("Messages");
  group.add_choice(
      "--progress", voice.progress, "FORM",
      "Progress on stderr: auto (default; a bar on a terminal, otherwise plain), plain "
      "(lines\nof text) or json (lines of JSON)");
  group
      .add_option("--progress-interval", voice.progress_seconds, "SECONDS",
                  "Time between two lines of progress" + default_text("30"))
      .in_range(0.0, 86'400.0);
  group.add_option("--log", voice.log_path, "FILE",
                   "Append messages and lines of progress to FILE, with the time");
}

void set_voice(const Voice& voice) {
  if (voice.quiet && voice.progress != ProgressForm::automatic) {
    throw Error("usage",
                "--progress cannot be combined with --quiet, which prints no progress; a --log has "
                "the progress of a quiet command too");
  }
  current() = voice;
}

bool is_quiet() noexcept { return current().quiet; }
bool is_verbose() noexcept { return current().verbose; }
ProgressForm progress_form() noexcept { return current().progress; }
double progress_seconds() noexcept { return current().progress_seconds; }

bool is_terminal(std::FILE* stream) {
  const std::string_view type = variable("TERM");
  return ::isatty(::fileno(stream)) != 0 && !type.empty() && type != "dumb";
}

TextStyle style_of(std::FILE* stream) {
  if (current().color != "auto") return {.is_coloured = current().color == "always"};
  return {.is_coloured = variable("NO_COLOR").empty() && is_terminal(stream)};
}

}  // namespace loadstone::cli
