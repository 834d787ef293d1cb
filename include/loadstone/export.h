// Supported platforms, and the mark of what the library exports.
//
// loadstone is for 64-bit little-endian Linux, compiled as C++20 by g++ 12 or clang 14 and later.
#pragma once

#include <bit>

static_assert(std::endian::native == std::endian::little && sizeof(void*) == 8,
              "bytes go from files to memory as they are: 64-bit little-endian machines only");

// The library is compiled with hidden visibility; what has this mark is its interface. Classes with
// it can be thrown, caught and derived from across the boundary of a shared library.
#define LOADSTONE_API __attribute__((visibility("default")))
// For what stands inside of a class that has it, and is none of the interface.
#define LOADSTONE_PRIVATE __attribute__((visibility("hidden")))
