// bitsandbytes' formats, one value at a time, from docs/formats/bitsandbytes.md.
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

// `numbers`: already in F32.
Encoded encode_4bit(const Bnb4& form, const std::vector<float>& numbers);
std::vector<float> decode_4bit(const Bnb4& form, const Encoded& encoded, std::size_t count);

Encoded encode_int8(BnbDialect dialect, const std::vector<float>& numbers, std::size_t columns);
std::vector<float> decode_int8(const Encoded& encoded, std::size_t columns);

// 8-bit scales; `absmax` has one entry per 256.
Encoded encode_nested(BnbDialect dialect, const std::vector<float>& scales, float offset);
std::vector<float> decode_nested(const Encoded& encoded, float offset);

// Inputs. The ramp is exact in every dtype.
std::vector<float> ramp(std::size_t count);

// ties: scaled values at thresholds and codes, and their neighbours. special: with infinities and
// NaNs. small: around F16's smallest value, and where F16 has less precision than BF16.
enum class Kind { normal, wide, small, ties, zeros, subnormal, special };
std::vector<float> numbers_of(Kind kind, std::size_t count, unsigned seed);

}  // namespace loadstone::reference
