// Declares one function per command, which describes the command to the parser and registers its
// action.
#pragma once

#include "cli/parser.h"
#include "cli/voice.h"

namespace loadstone::cli {

// Options that every command has. Not thread-safe.
struct Chosen {
  bool json = false;
  Voice voice;
};

void add_inspect(Program& program, Chosen& chosen);
void add_plan(Program& program, Chosen& chosen);
void add_load(Program& program, Chosen& chosen);
void add_convert(Program& program, Chosen& chosen);
void add_merge(Program& program, Chosen& chosen);
void add_verify(Program& program, Chosen& chosen);
void add_bench(Program& program, Chosen& chosen);
void add_explain(Program& program, Chosen& chosen);
// These three commands use the list of commands, which they read only when they run, after all
// commands are registered.
void add_help(Program& program, Chosen& chosen);
void add_completion(Program& program, Chosen& chosen);
void add_man(Program& program, Chosen& chosen);

}  // namespace loadstone::cli
