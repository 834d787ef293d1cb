// Runs the command line: parses it, runs the command, and maps errors to exit statuses.
#pragma once

namespace loadstone::cli {

// Runs one command and returns its exit status: 0 done, 1 done with findings, 2 wrong usage, 3 an
// invalid or unsupported file, 4 an input/output error, 5 not enough memory, 130 interrupted.
int run(int argc, const char* const* argv);

}  // namespace loadstone::cli
