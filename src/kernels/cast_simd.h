// The casts that most loads need, written once for all vector widths (Google Highway) and chosen at
// run time. The same bytes as number.h on every instruction set: a test compares them all.
#pragma once

#include <cstddef>
#include <cstdint>

namespace loadstone::simd {

void f32_from_bf16(const std::byte* source, std::byte* target, std::uint64_t count) noexcept;
void f32_from_f16(const std::byte* source, std::byte* target, std::uint64_t count) noexcept;
void bf16_from_f16(const std::byte* source, std::byte* target, std::uint64_t count) noexcept;
void f32_from_f8_e4m3(const std::byte* source, std::byte* target, std::uint64_t count) noexcept;
void bf16_from_f8_e4m3(const std::byte* source, std::byte* target, std::uint64_t count) noexcept;

// These return whether some number is too large for the target, or not finite.
bool bf16_from_f32(const std::byte* source, std::byte* target, std::uint64_t count) noexcept;
bool f16_from_f32(const std::byte* source, std::byte* target, std::uint64_t count) noexcept;
bool f16_from_bf16(const std::byte* source, std::byte* target, std::uint64_t count) noexcept;

}  // namespace loadstone::simd
