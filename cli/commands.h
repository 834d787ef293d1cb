// One function a command: it describes the command to the parser and says what to run.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

#include "cli/voice.h"

namespace loadstone::cli {

// What the parser leaves behind. Not thread-safe.
struct Chosen {
  bool json = false;
  Voice voice;
  std::function<int()> action;  // returns the exit status; throws for failures
};

void add_inspect(CLI::App& app, Chosen& chosen);
void add_plan(CLI::App& app, Chosen& chosen);
void add_load(CLI::App& app, Chosen& chosen);
void add_convert(CLI::App& app, Chosen& chosen);
void add_merge(CLI::App& app, Chosen& chosen);
void add_verify(CLI::App& app, Chosen& chosen);
void add_bench(CLI::App& app, Chosen& chosen);
void add_explain(CLI::App& app, Chosen& chosen);
// These three look at `app` when they run, so that they know every command.
void add_help(CLI::App& app, Chosen& chosen);
void add_completion(CLI::App& app, Chosen& chosen);
void add_man(CLI::App& app, Chosen& chosen);

}  // namespace loadstone::cli
