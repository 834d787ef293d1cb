// What must hold for every input.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>

#include "fuzz/input.h"
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

// The body of an entry point: runs one input, of whose errors those may come out that are allowed.
template <typename Run, typename IsAllowed>
int run_input(std::span<const std::uint8_t> bytes, const Run& run, const IsAllowed& is_allowed) {
  Input input(bytes);
  try {
    run(input);
  } catch (const Error& error) {
    require_allowed(error, is_allowed(error));
  }
  return 0;
}

}  // namespace loadstone::fuzz
