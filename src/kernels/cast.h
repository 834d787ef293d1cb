// Casts from one dtype to another, with torch's results bit for bit, the same bytes on every
// instruction set. Pointers need no alignment. Source and target must not overlap.
#pragma once

#include <cstddef>
#include <cstdint>

#include "loadstone/dtype.h"

namespace loadstone {

// Returns true if cast() supports the pair: every dtype of whole bytes to itself, and all pairs of
// f64, f32, f16, bf16, f8_e4m3, f8_e5m2, the integers and bool. f8_e8m0 is a source only.
[[nodiscard]] bool can_cast(Dtype source, Dtype target) noexcept;

// Casts `count` elements; strides count elements of either side. Thread-safe.
using CastStrided = void (*)(const std::byte* source, std::uint64_t source_stride,
                             std::byte* target, std::uint64_t target_stride,
                             std::uint64_t count) noexcept;
// The same for contiguous elements on both sides.
using CastRun = void (*)(const std::byte* source, std::byte* target, std::uint64_t count) noexcept;

// Finite values that are too large for a dtype: they become infinite, or the largest value of a
// dtype without infinities.
struct Overflow {
  std::uint64_t count = 0;
  double largest = 0;  // magnitude
  // Values that are NaN or infinite although their codes are finite, because of a scale.
  std::uint64_t spoiled = 0;

  Overflow& operator+=(const Overflow& other) noexcept {
    count += other.count;
    spoiled += other.spoiled;
    if (other.largest > largest) largest = other.largest;
    return *this;
  }
};

// Counts them among `count` elements of a source. Thread-safe.
using CountOverflow = Overflow (*)(const std::byte* source, std::uint64_t source_stride,
                                   std::uint64_t count) noexcept;

// Casts like CastRun; returns true if CountOverflow may find some, at no cost.
using CastWatched = bool (*)(const std::byte* source, std::byte* target,
                             std::uint64_t count) noexcept;

struct Cast {
  CastRun run = nullptr;
  CastStrided strided = nullptr;
  CountOverflow overflow = nullptr;  // null if the target represents every finite value
  CastWatched watched = nullptr;     // of the pairs that most loads need
};

// All members are null unless can_cast(source, target).
[[nodiscard]] Cast cast_between(Dtype source, Dtype target) noexcept;

// Counts the floats before the first NaN or infinity. The dtype has casts.
[[nodiscard]] std::uint64_t finite_numbers(Dtype dtype, const std::byte* numbers,
                                           std::uint64_t count) noexcept;

}  // namespace loadstone
