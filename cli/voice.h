// Verbosity and colours of the command, decided here for all commands.
#pragma once

#include <cstdio>
#include <string>

#include "base/text_style.h"
#include "cli/parser.h"

namespace loadstone::cli {

// Options as typed.
struct Voice {
  bool quiet = false;
  bool verbose = false;
  std::string color = "auto";
};

// --quiet, --verbose and --color, which every command has.
void add_voice_options(Command command, Voice& voice);

// Once, before a command runs: the functions below follow it. Not thread-safe until then.
void set_voice(const Voice& voice);

// Errors only: no progress, no warnings, no hints, and no report of work that was done.
[[nodiscard]] bool is_quiet() noexcept;
// All warnings, and what to do about an error.
[[nodiscard]] bool is_verbose() noexcept;

// Returns true if the stream is a terminal that can move its cursor (TERM is set, and not to
// "dumb").
[[nodiscard]] bool is_terminal(std::FILE* stream);
// Determined by --color; by default a terminal has colours unless NO_COLOR is set.
[[nodiscard]] TextStyle style_of(std::FILE* stream);

}  // namespace loadstone::cli
