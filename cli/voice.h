// Determines the verbosity, progress and colours of the output for all commands.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#include "base/text_style.h"
#include "cli/parser.h"

namespace loadstone::cli {

// Form of the progress of long work on stderr.
enum class ProgressForm : std::uint8_t {
  automatic,  // a bar on a terminal, otherwise lines
  plain,      // lines of text
  json        // lines of JSON
};
[[nodiscard]] std::string_view name(ProgressForm form) noexcept;

// Options for the output, as typed.
struct Voice {
  bool quiet = false;
  bool verbose = false;
  std::string color = "auto";
  ProgressForm progress = ProgressForm::automatic;
  double progress_seconds = 30;  // between two lines
  std::string log_path;          // may be empty
};

// Adds --quiet, --verbose and --color, which every command has.
void add_voice_options(Command command, Voice& voice);
// Adds --progress, --progress-interval and --log, for commands whose work can take hours.
void add_progress_options(Command command, Voice& voice);

// Sets the options that the functions below use. Call once, before a command runs; the functions
// are not thread-safe until then. Throws Error "usage" for options that contradict each other.
void set_voice(const Voice& voice);

// Returns true if only errors are printed: no progress, warnings, hints, or reports of finished
// work.
[[nodiscard]] bool is_quiet() noexcept;
// Returns true if all warnings are printed, and suggestions for errors.
[[nodiscard]] bool is_verbose() noexcept;
[[nodiscard]] ProgressForm progress_form() noexcept;
// Returns the time between two lines of progress.
[[nodiscard]] double progress_seconds() noexcept;

// Returns true if the stream is a terminal that can move its cursor: TERM is set, and is not
// "dumb".
[[nodiscard]] bool is_terminal(std::FILE* stream);
// Returns the style for a stream. --color determines it; by default a terminal has colours unless
// NO_COLOR is set.
[[nodiscard]] TextStyle style_of(std::FILE* stream);

}  // namespace loadstone::cli
