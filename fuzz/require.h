// What must hold for every input.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace loadstone::fuzz {

// Ends the process where it does not, which is what a fuzzer looks for. The place is that of the
// call: clang 14 has these builtins and no std::source_location.
inline void require(bool holds, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (holds) return;
  std::fprintf(stderr, "%s:%d: does not hold\n", file, line);
  std::abort();
}

}  // namespace loadstone::fuzz
