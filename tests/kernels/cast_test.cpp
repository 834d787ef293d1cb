#include "kernels/cast.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/forced_target.h"
#include "kernels/number.h"

namespace loadstone {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::array dtypes = {Dtype::boolean, Dtype::u8,      Dtype::i8,      Dtype::u16,
                               Dtype::i16,     Dtype::u32,     Dtype::i32,     Dtype::u64,
                               Dtype::i64,     Dtype::f16,     Dtype::bf16,    Dtype::f32,
                               Dtype::f64,     Dtype::f8_e4m3, Dtype::f8_e5m2, Dtype::f8_e8m0};

std::vector<std::pair<Dtype, Dtype>> all_pairs() {
  std::vector<std::pair<Dtype, Dtype>> pairs;
  for (const Dtype source : dtypes) {
    for (const Dtype target : dtypes) {
      if (target != source && target != Dtype::f8_e8m0) pairs.emplace_back(source, target);
    }
  }
  return pairs;
}

// ---- values out of range

std::vector<Dtype> floats() {
  std::vector<Dtype> all;
  std::ranges::copy_if(dtypes, std::back_inserter(all),
                       [](Dtype dtype) { return kind(dtype) == DtypeKind::floating; });
  return all;
}

double value_of(Dtype dtype, const std::byte* from) {
  double value = 0;
  cast_between(dtype, Dtype::f64).run(from, reinterpret_cast<std::byte*>(&value), 1);
  return value;
}

// Returns all values of a dtype of up to 16 bits. For wider dtypes, returns values with all
// exponents, and values near the limits of every dtype.
Bytes floats_of(Dtype dtype) {
  Bytes bytes;
  const std::size_t size = element_bytes(dtype);
  const auto add = [&](std::uint64_t word) {
    bytes.resize(bytes.size() + size);
    std::memcpy(bytes.data() + bytes.size() - size, &word, size);
  };
  if (size <= 2) {
    for (std::uint64_t word = 0; word < (std::uint64_t{1} << (8 * size)); ++word) add(word);
    return bytes;
  }
  for (const double limit : {464.0, 61440.0, 65520.0, 65536.0, 0x1.ffp127, 0x1.ffffffp127}) {
    const auto single = std::bit_cast<std::uint32_t>(static_cast<float>(limit));
    const std::uint64_t middle = size == 4 ? single : std::bit_cast<std::uint64_t>(limit);
    for (std::uint64_t i = 0; i < 4000; ++i) add(middle - 2000 + i);
    if (size == 4) continue;
    // Kernels round F64 to F32 first.
    for (const float each : {std::nextafter(static_cast<float>(limit), 0.0F),
                             std::nextafter(static_cast<float>(limit), HUGE_VALF)}) {
      const double half = (limit + double{each}) / 2;
      for (std::uint64_t i = 0; i < 8; ++i) add(std::bit_cast<std::uint64_t>(half) - 4 + i);
    }
  }
  for (std::uint64_t top = 0; top < 4096; ++top) {
    for (const std::uint64_t low : {std::uint64_t{0}, ~std::uint64_t{0} >> 12}) {
      add((top << 52 | low) >> (64 - 8 * size));
    }
  }
  return bytes;
}

TEST(Casts, NumbersThatAreTooLargeAreCounted) {
  std::uint64_t counted = 0;
  int watched = 0;
  for (const auto& [source, target] : all_pairs()) {
    if (kind(source) != DtypeKind::floating || kind(target) != DtypeKind::floating) continue;
    const Cast cast = cast_between(source, target);
    const std::size_t size = element_bytes(source);
    const Bytes numbers = floats_of(source);
    Overflow expected;
    for (std::size_t at = 0; at < numbers.size(); at += size) {
      std::array<std::byte, 8> made{};
      cast.run(numbers.data() + at, made.data(), 1);
      const double before = value_of(source, numbers.data() + at);
      const double after = value_of(target, made.data());
      if (!std::isfinite(before)) continue;
      const bool is_over = !std::isfinite(after) ||
                           (target == Dtype::f8_e4m3 && std::abs(static_cast<float>(before)) > 464);
      if (is_over) expected += {.count = 1, .largest = std::abs(before)};
      if (cast.overflow == nullptr) continue;
      const Overflow one = cast.overflow(numbers.data() + at, 1, 1);
      ASSERT_EQ(one.count, is_over ? 1u : 0u)
          << name(source) << " " << before << " to " << name(target) << " " << after;
    }
    ASSERT_EQ(cast.overflow != nullptr, expected.count > 0) << name(source) << name(target);
    if (cast.overflow == nullptr) continue;
    const Overflow found = cast.overflow(numbers.data(), 1, numbers.size() / size);
    EXPECT_EQ(found.count, expected.count);
    EXPECT_EQ(found.largest, expected.largest);
    if (cast.watched != nullptr) {
      Bytes made(numbers.size() / size * element_bytes(target));
      for (std::size_t at = 0; at < numbers.size(); at += size) {
        const Overflow one = cast.overflow(numbers.data() + at, 1, 1);
        const bool is_finite = finite_numbers(source, numbers.data() + at, 1) == 1;
        ASSERT_EQ(cast.watched(numbers.data() + at, made.data(), 1), one.count > 0 || !is_finite);
      }
      ASSERT_TRUE(cast.watched(numbers.data(), made.data(), numbers.size() / size));
      const Bytes zeros(size * 64);
      ASSERT_FALSE(cast.watched(zeros.data(), made.data(), 64));
      ++watched;
    }
    const Overflow every_other = cast.overflow(numbers.data(), 2, numbers.size() / size / 2);
    EXPECT_LT(every_other.count, found.count);
    counted += found.count;
  }
  EXPECT_GT(counted, 10'000u);
  EXPECT_EQ(watched, 3);
}

TEST(Casts, NumbersBeforeTheFirstThatIsNotFinite) {
  for (const Dtype dtype : floats()) {
    const std::size_t size = element_bytes(dtype);
    const Bytes numbers = floats_of(dtype);
    const std::uint64_t count = numbers.size() / size;
    std::uint64_t at = 0;
    for (std::uint64_t i = 0; i < count; ++i) {  // steps from one non-finite value to the next
      if (std::isfinite(value_of(dtype, numbers.data() + i * size))) continue;
      ASSERT_EQ(finite_numbers(dtype, numbers.data() + at * size, count - at), i - at);
      at = i + 1;
      if (at > 5000) break;
    }
    EXPECT_GT(at, 0u);
  }
}

// ---- the same inputs and fingerprints as in tests/golden/make_cast_goldens.py

std::uint64_t splitmix(std::uint64_t place, std::uint64_t seed) {
  std::uint64_t word = (place + 1) * 0x9e3779b97f4a7c15u + seed;
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
  return word ^ (word >> 31);
}

std::uint64_t fingerprint(const Bytes& bytes) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    sum += (static_cast<std::uint64_t>(bytes[i]) + 1) * splitmix(i, 99);
  }
  return sum;
}

constexpr std::size_t random_count = 20000;

std::vector<std::uint64_t> wide_floats(unsigned mantissa_bits, unsigned exponent_bits,
                                       std::uint64_t seed) {
  std::vector<std::uint64_t> mantissas;
  const std::uint64_t whole = std::uint64_t{1} << mantissa_bits;
  for (const unsigned kept : {0u, 1u, 2u, 3u, 7u, 8u, 10u, 11u, 23u, 24u}) {
    if (kept >= mantissa_bits) continue;
    const std::uint64_t unit = whole >> kept;
    for (const std::uint64_t base : {std::uint64_t{0}, unit, 2 * unit, whole - unit}) {
      for (const std::uint64_t near : {~std::uint64_t{0}, std::uint64_t{0}, std::uint64_t{1},
                                       unit / 2 - 1, unit / 2, unit / 2 + 1}) {
        mantissas.push_back((base + near) % whole);
      }
    }
  }
  std::vector<std::uint64_t> words;
  for (std::uint64_t top = 0; top < (std::uint64_t{2} << exponent_bits); ++top) {
    for (const std::uint64_t mantissa : mantissas) words.push_back(top * whole | mantissa);
  }
  for (std::size_t i = 0; i < random_count; ++i) words.push_back(splitmix(i, seed));
  return words;
}

std::vector<std::uint64_t> words_for(Dtype dtype) {
  const std::size_t size = element_bytes(dtype);
  if (dtype == Dtype::f32) return wide_floats(23, 8, 1);
  if (dtype == Dtype::f64) return wide_floats(52, 11, 2);
  std::vector<std::uint64_t> words;
  if (size <= 2) {
    for (std::uint64_t word = 0; word < (std::uint64_t{1} << (8 * size)); ++word) {
      words.push_back(dtype == Dtype::boolean ? word % 2 : word);
    }
    return words;
  }
  for (std::size_t i = 0; i < random_count; ++i) words.push_back(splitmix(i, 3) >> (i % 64));
  for (unsigned bit = 0; bit < 64; ++bit) {
    for (std::uint64_t near = 0; near < 7; ++near) {
      words.push_back((std::uint64_t{1} << bit) + near - 3);
    }
  }
  return words;
}

Bytes inputs(Dtype dtype) {
  const std::size_t size = element_bytes(dtype);
  const std::vector<std::uint64_t> words = words_for(dtype);
  Bytes bytes(words.size() * size);
  for (std::size_t i = 0; i < words.size(); ++i) {
    std::memcpy(bytes.data() + i * size, &words[i], size);
  }
  return bytes;
}

Bytes cast_all(Dtype source, Dtype target, const Bytes& from) {
  const std::size_t count = from.size() / element_bytes(source);
  Bytes to(count * element_bytes(target));
  cast_between(source, target).run(from.data(), to.data(), count);
  return to;
}

// Returns the range of an integer dtype as doubles. The upper bound is exclusive.
std::pair<double, double> range_of(Dtype dtype) {
  const bool is_signed =
      dtype == Dtype::i8 || dtype == Dtype::i16 || dtype == Dtype::i32 || dtype == Dtype::i64;
  const int bit_count = static_cast<int>(bits(dtype));
  if (is_signed) return {-std::ldexp(1.0, bit_count - 1), std::ldexp(1.0, bit_count - 1)};
  return {0.0, std::ldexp(1.0, bit_count)};
}

// Returns the inputs without floats outside the integer's range, because torch defines no result
// for them.
Bytes inputs_for(Dtype source, Dtype target) {
  Bytes all = inputs(source);
  if (kind(source) != DtypeKind::floating || kind(target) != DtypeKind::integer) return all;
  const Bytes as_f64 = source == Dtype::f64 ? all : cast_all(source, Dtype::f64, all);
  const auto [lowest, bound] = range_of(target);
  const std::size_t size = element_bytes(source);
  Bytes chosen;
  for (std::size_t i = 0; i < as_f64.size() / 8; ++i) {
    double value = 0;
    std::memcpy(&value, as_f64.data() + i * 8, 8);
    const double cut = std::trunc(value);
    if (!(cut >= lowest && cut < bound)) continue;  // also excludes NaN
    const auto at = all.begin() + static_cast<std::ptrdiff_t>(i * size);
    chosen.insert(chosen.end(), at, at + static_cast<std::ptrdiff_t>(size));
  }
  return chosen;
}

std::map<std::pair<std::string, std::string>, std::uint64_t> goldens() {
  std::map<std::pair<std::string, std::string>, std::uint64_t> goldens;
  std::ifstream file(LOADSTONE_GOLDEN_DIR "/casts.txt");
  std::string source;
  std::string target;
  std::string hex;
  while (file >> source >> target >> hex) {
    goldens[{source, target}] = std::stoull(hex, nullptr, 16);
  }
  return goldens;
}

TEST(CastTest, EveryPairGivesTheBitsOfTorch) {
  const auto expected = goldens();
  ASSERT_EQ(expected.size(), all_pairs().size() + dtypes.size());
  for (const Dtype source : dtypes) {
    const std::string source_name(name(source));
    ASSERT_EQ(fingerprint(inputs(source)), expected.at({source_name, "-"})) << source_name;
  }
  for (const auto& [source, target] : all_pairs()) {
    const std::string source_name(name(source));
    const std::string target_name(name(target));
    ASSERT_TRUE(can_cast(source, target));
    const Bytes result = cast_all(source, target, inputs_for(source, target));
    EXPECT_EQ(fingerprint(result), expected.at({source_name, target_name}))
        << source_name << " to " << target_name;
  }
}

TEST(CastTest, TheFingerprintSeesOneBit) {
  Bytes result = cast_all(Dtype::f32, Dtype::bf16, inputs(Dtype::f32));
  const std::uint64_t before = fingerprint(result);
  result[4321] ^= std::byte{1};
  EXPECT_NE(fingerprint(result), before);
}

TEST(CastTest, WhatDoesNotFitAnIntegerIsTheSameEverywhere) {
  const auto cast_f64 = [](double value, Dtype target) {
    Bytes from(8);
    std::memcpy(from.data(), &value, 8);
    const Bytes to = cast_all(Dtype::f64, target, from);
    std::uint64_t result = 0;
    std::memcpy(&result, to.data(), to.size());
    return result;
  };
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(cast_f64(std::nan(""), Dtype::i64), 1ull << 63);
  EXPECT_EQ(cast_f64(infinity, Dtype::i32), 1ull << 31);
  EXPECT_EQ(cast_f64(3e9, Dtype::i16), 0u);
  EXPECT_EQ(cast_f64(300.7, Dtype::u8), 44u);
  EXPECT_EQ(cast_f64(-1.5, Dtype::u8), 255u);
  EXPECT_EQ(cast_f64(1e10, Dtype::u32), 1410065408u);
  EXPECT_EQ(cast_f64(0x1p63, Dtype::u64), 1ull << 63);
  EXPECT_EQ(cast_f64(infinity, Dtype::u64), 0u);
}

TEST(CastTest, StridesReachTheSameElements) {
  for (const auto& [source, target] : all_pairs()) {
    const std::size_t from_size = element_bytes(source);
    const std::size_t to_size = element_bytes(target);
    const Bytes from = inputs(source);
    const std::uint64_t count = std::min<std::uint64_t>(from.size() / from_size, 200) / 3;
    Bytes to(count * 2 * to_size, std::byte{0x5a});
    const Cast cast = cast_between(source, target);
    cast.strided(from.data(), 3, to.data(), 2, count);
    for (std::uint64_t i = 0; i < count; ++i) {
      Bytes one(to_size);
      cast.run(from.data() + i * 3 * from_size, one.data(), 1);
      const std::byte* written = to.data() + i * 2 * to_size;
      ASSERT_EQ(std::memcmp(written, one.data(), to_size), 0) << name(source) << name(target);
      for (std::size_t k = 0; k < to_size; ++k) ASSERT_EQ(written[to_size + k], std::byte{0x5a});
    }
  }
}

TEST(CastTest, EveryLengthAndAlignmentStaysInside) {
  for (const auto& [source, target] : all_pairs()) {
    const std::size_t from_size = element_bytes(source);
    const std::size_t to_size = element_bytes(target);
    const Bytes values = inputs(source);
    const Bytes expected = cast_all(source, target, values);
    const std::uint64_t whole = values.size() / from_size;
    for (std::uint64_t count = 0; count <= std::min<std::uint64_t>(whole, 40); ++count) {
      for (std::size_t shift = 0; shift < 3; ++shift) {
        Bytes from(shift + count * from_size);
        std::memcpy(from.data() + shift, values.data(), count * from_size);
        Bytes to(shift + count * to_size + 9, std::byte{0x5a});
        cast_between(source, target).run(from.data() + shift, to.data() + shift, count);
        ASSERT_EQ(std::memcmp(to.data() + shift, expected.data(), count * to_size), 0);
        ASSERT_TRUE(std::all_of(to.end() - 9, to.end(),
                                [](std::byte byte) { return byte == std::byte{0x5a}; }));
      }
    }
  }
}

TEST(CastTest, EveryInstructionSetGivesTheSameBytes) {
  std::size_t compared = 0;
  for (const Dtype source : {Dtype::f8_e4m3, Dtype::f16, Dtype::bf16, Dtype::f32}) {
    for (const Dtype target : {Dtype::f16, Dtype::bf16, Dtype::f32}) {
      if (source == target) continue;
      const Bytes from = inputs(source);
      const std::uint64_t count = from.size() / element_bytes(source);
      // A kernel converts single elements without its vector code.
      Bytes expected(count * element_bytes(target));
      cast_between(source, target).strided(from.data(), 1, expected.data(), 1, count);
      for (const std::int64_t isa : hwy::SupportedAndGeneratedTargets()) {
        const ForcedTarget forced(isa);
        EXPECT_TRUE(cast_all(source, target, from) == expected)
            << name(source) << " to " << name(target) << " on " << hwy::TargetName(isa);
        ++compared;
      }
    }
  }
  EXPECT_GE(compared, 9u);
}

TEST(CastTest, TheTableSaysWhatThereIs) {
  EXPECT_FALSE(can_cast(Dtype::f32, Dtype::f8_e8m0));
  EXPECT_FALSE(can_cast(Dtype::f32, Dtype::f4));
  EXPECT_FALSE(can_cast(Dtype::c64, Dtype::f32));
  EXPECT_FALSE(can_cast(Dtype::f8_e4m3fnuz, Dtype::f32));
  EXPECT_FALSE(can_cast(Dtype::f4, Dtype::f4));
  EXPECT_EQ(cast_between(Dtype::c64, Dtype::f32).strided, nullptr);
  for (unsigned i = 0; i <= static_cast<unsigned>(Dtype::c128); ++i) {
    const auto dtype = static_cast<Dtype>(i);
    EXPECT_EQ(element_bytes(dtype) * 8, bits(dtype) % 8 == 0 ? bits(dtype) : 0) << name(dtype);
    EXPECT_EQ(can_cast(dtype, dtype), bits(dtype) % 8 == 0) << name(dtype);
  }
}

// The table of dtypes contains the range of powers of two that each float represents exactly.
TEST(CastTest, KeepsThePowersOfTwoOfAFormatAndNoOthers) {
  for (const DtypeInfo& known : dtype_table) {
    if (!can_cast(Dtype::f64, known.dtype) || known.kind != DtypeKind::floating) continue;
    const auto kept = [&](int exponent) {
      const double value = std::ldexp(1.0, exponent);
      std::array<std::byte, 8> number;
      double back = 0;
      cast_between(Dtype::f64, known.dtype)
          .run(reinterpret_cast<const std::byte*>(&value), number.data(), 1);
      cast_between(known.dtype, Dtype::f64)
          .run(number.data(), reinterpret_cast<std::byte*>(&back), 1);
      return back == value;
    };
    for (int e = known.format.smallest; e <= known.format.largest; ++e) {
      EXPECT_TRUE(kept(e)) << known.name << " 2^" << e;
    }
    if (known.dtype == Dtype::f64) continue;
    EXPECT_FALSE(kept(known.format.smallest - 1)) << known.name;
    EXPECT_FALSE(kept(known.format.largest + 1)) << known.name;
  }
}

TEST(CastTest, TheSameDtypeKeepsEveryBit) {
  for (const Dtype dtype : dtypes) {
    const Bytes from = inputs(dtype);
    EXPECT_TRUE(cast_all(dtype, dtype, from) == from) << name(dtype);
  }
}

}  // namespace
}  // namespace loadstone
