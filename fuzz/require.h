// What must hold for every input.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "loadstone/error.h"

namespace loadstone::fuzz {

// Ends the process where it does not, which is what a fuzzer looks for. The place is that of the
// call: clang 14 has these builtins and no std::source_location.
inline void require(bool holds, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (holds) return;
  std::fprintf(stderr, "%s:%d: does not hold\n", file, line);
  std::abort();
}

// The same of an error that came out: it is shown where it is none that may.
inline void require_allowed(const Error& error, bool is_allowed) {
  if (is_allowed) return;
  std::fprintf(stderr, "unexpected error: %s\n", error.what());
  std::abort();
}

}  // namespace loadstone::fuzz
