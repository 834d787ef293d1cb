// Determines the verbosity and colours of the output for all commands.
#pragma once

#include <cstdio>
#include <string>

#include "base/text_style.h"
#include "cli/parser.h"

namespace loadstone::cli {

// Options for the output, as typed.
struct Voice {
  bool quiet = false;
  bool verbose = false;
  std::string color = "auto";
};

// Adds --quiet, --verbose and --color, which every command has.
void add_voice_options(Command command, Voice& voice);

// Sets the options that the functions below use. Call once, before a command runs; the functions
// are not thread-safe until then.
void set_voice(const Voice& voice);

// Returns true if only errors are printed: no progress, warnings, hints, or reports of finished
// work.
[[nodiscard]] bool is_quiet() noexcept;
// Returns true if all warnings are printed, and suggestions for errors.
[[nodiscard]] bool is_verbose() noexcept;

// Returns true if the stream is a terminal that can move its cursor: TERM is set, and is not
// "dumb".
[[nodiscard]] bool is_terminal(std::FILE* stream);
// Returns the style for a stream. --color determines it; by default a terminal has colours unless
// NO_COLOR is set.
[[nodiscard]] TextStyle style_of(std::FILE* stream);

}  // namespace loadstone::cli
