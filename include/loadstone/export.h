// Supported platforms, and the macro for exported symbols.
//
// loadstone is for 64-bit little-endian Linux, compiled as C++20 by g++ 12 or clang 14 and later.
#pragma once

#include <bit>

static_assert(std::endian::native == std::endian::little && sizeof(void*) == 8,
              "bytes go from files to memory as they are: 64-bit little-endian machines only");

// Marks the public symbols of the library, which is compiled with hidden visibility. Classes with
// this mark can be thrown, caught and derived from across the boundary of a shared library.
#define LOADSTONE_API __attribute__((visibility("default")))
// Marks private members of a class that is marked LOADSTONE_API.
#define LOADSTONE_PRIVATE __attribute__((visibility("hidden")))
