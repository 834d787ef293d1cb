// The command line: parsing, dispatch, and the mapping of errors to exit statuses.
#pragma once

namespace loadstone::cli {

// Runs one command and returns its exit status: 0 done, 1 done and found something, 2 wrong usage,
// 3 a bad or unsupported file, 4 input/output, 5 does not fit in memory, 130 interrupted.
int run(int argc, const char* const* argv);

}  // namespace loadstone::cli
