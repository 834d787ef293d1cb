// Encodes and decodes bitsandbytes' formats one value at a time, as docs/formats/bitsandbytes.md
// defines them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/bnb.h"

namespace loadstone::reference {

struct Encoded {
  std::vector<std::byte> data;
  std::vector<float> absmax;
};

// `numbers` contains the values after rounding to F32.
Encoded encode_4bit(const Bnb4& form, const std::vector<float>& numbers);
std::vector<float> decode_4bit(const Bnb4& form, const Encoded& encoded, std::size_t count);

Encoded encode_int8(BnbDialect dialect, const std::vector<float>& numbers, std::size_t columns);
std::vector<float> decode_int8(const Encoded& encoded, std::size_t columns);

// Encodes scales to 8 bits; `absmax` has one entry for each 256 scales.
Encoded encode_nested(BnbDialect dialect, const std::vector<float>& scales, float offset);
std::vector<float> decode_nested(const Encoded& encoded, float offset);

// Returns ascending values that every dtype can represent exactly.
std::vector<float> ramp(std::size_t count);

// Kinds of test inputs. ties: scaled values at thresholds and codes, and their neighbours. special:
// includes infinities and NaNs. small: around F16's smallest value, and where F16 has less
// precision than BF16.
enum class Kind { normal, wide, small, ties, zeros, subnormal, special };
std::vector<float> numbers_of(Kind kind, std::size_t count, unsigned seed);

}  // namespace loadstone::reference
