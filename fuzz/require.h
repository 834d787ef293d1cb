// Checks conditions that every input must satisfy.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>

#include "fuzz/input.h"
#include "loadstone/error.h"

namespace loadstone::fuzz {

// Aborts if the condition is false, which a fuzzer detects. Prints the caller's file and line with
// builtins, because clang 14 has no std::source_location.
inline void require(bool holds, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (holds) return;
  std::fprintf(stderr, "%s:%d: does not hold\n", file, line);
  std::abort();
}

// Aborts if the thrown error is not allowed, after printing it.
inline void require_allowed(const Error& error, bool is_allowed) {
  if (is_allowed) return;
  std::fprintf(stderr, "unexpected error: %s\n", error.what());
  std::abort();
}

// Runs one input and accepts only allowed errors; the body of LLVMFuzzerTestOneInput().
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
