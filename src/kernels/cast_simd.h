// The casts that most loads need, written once for all vector widths (Google Highway). The widest
// that the CPU supports is chosen at run time. A test compares their bytes with number.h on every
// instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace loadstone::simd {

void f32_from_bf16(const std::byte* source, std::byte* target, std::uint64_t count) noexcept;
void f32_from_f16(const std::byte* source, std::byte* target, std::uint64_t count) noexcept;
void bf16_from_f16(const std::byte* source, std::byte* target, std::uint64_t count) noexcept;
void f32_from_f8_e4m3(const std::byte* source, std::byte* target, std::uint64_t count) noexcept;
void bf16_from_f8_e4m3(const std::byte* source, std::byte* target, std::uint64_t count) noexcept;

// These casts return true if a value is too large for the target, or non-finite.
bool bf16_from_f32(const std::byte* source, std::byte* target, std::uint64_t count) noexcept;
bool f16_from_f32(const std::byte* source, std::byte* target, std::uint64_t count) noexcept;
bool f16_from_bf16(const std::byte* source, std::byte* target, std::uint64_t count) noexcept;

}  // namespace loadstone::simd
