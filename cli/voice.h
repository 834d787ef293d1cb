// How much the command says, and in which colours: the one place that decides it for all commands.
#pragma once

#include <cstdio>
#include <string>

#include "base/text_style.h"
#include "cli/parser.h"

namespace loadstone::cli {

// As typed.
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

// Whether the stream is a terminal that can move its cursor (TERM is set, and not to "dumb").
[[nodiscard]] bool is_terminal(std::FILE* stream);
// --color decides; by itself a terminal has colours, unless NO_COLOR is set to anything.
[[nodiscard]] TextStyle style_of(std::FILE* stream);

}  // namespace loadstone::cli
