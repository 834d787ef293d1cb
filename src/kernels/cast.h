// Casts from one dtype to another. Results equal torch's in every bit, on every instruction set.
// Pointers need no alignment. Source and target must not overlap.
#pragma once

#include <cstddef>
#include <cstdint>

#include "loadstone/dtype.h"

namespace loadstone {

// Returns true if loadstone can cast the pair: every dtype of whole bytes to itself, and all pairs
// of f64, f32, f16, bf16, f8_e4m3, f8_e5m2, the integers and bool. f8_e8m0 is a source only.
[[nodiscard]] bool can_cast(Dtype source, Dtype target) noexcept;

// Casts `count` elements. Strides are in elements of the source and of the target. Thread-safe.
using CastStrided = void (*)(const std::byte* source, std::uint64_t source_stride,
                             std::byte* target, std::uint64_t target_stride,
                             std::uint64_t count) noexcept;
// Casts `count` contiguous elements to contiguous elements. Thread-safe.
using CastRun = void (*)(const std::byte* source, std::byte* target, std::uint64_t count) noexcept;

// Statistics about finite values that are too large for a target dtype. The cast makes them
// infinite, or the largest value if the dtype has no infinities.
struct Overflow {
  std::uint64_t count = 0;
  double largest = 0;  // the largest magnitude among these values
  // Number of decoded values that are NaN or infinite because of their scale: their codes are
  // finite.
  std::uint64_t spoiled = 0;

  Overflow& operator+=(const Overflow& other) noexcept {
    count += other.count;
    spoiled += other.spoiled;
    if (other.largest > largest) largest = other.largest;
    return *this;
  }
};

// Counts the values among `count` elements that overflow the target. Thread-safe.
using CountOverflow = Overflow (*)(const std::byte* source, std::uint64_t source_stride,
                                   std::uint64_t count) noexcept;

// Casts like CastRun. Returns true if CountOverflow may count some values. This check is free.
using CastWatched = bool (*)(const std::byte* source, std::byte* target,
                             std::uint64_t count) noexcept;

struct Cast {
  CastRun run = nullptr;
  CastStrided strided = nullptr;
  CountOverflow overflow = nullptr;  // null if the target represents every finite value
  CastWatched watched = nullptr;     // null except for the pairs that most loads need
};

// All members are null unless can_cast(source, target).
[[nodiscard]] Cast cast_between(Dtype source, Dtype target) noexcept;

// Returns the number of floats before the first NaN or infinity. `dtype` must support casts.
[[nodiscard]] std::uint64_t finite_numbers(Dtype dtype, const std::byte* numbers,
                                           std::uint64_t count) noexcept;

}  // namespace loadstone
