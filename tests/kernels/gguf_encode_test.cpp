// Compares encoded GGUF blocks with the blocks that ggml's reference code writes, on every
// instruction set and for every way of cutting the input.
#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cast.h"
#include "kernels/forced_target.h"
#include "kernels/gguf.h"
#include "kernels/golden_words.h"

namespace loadstone {
namespace {

using Bytes = std::vector<std::byte>;
using Numbers = std::vector<float>;

std::vector<BlockFormat> encoded_formats() {
  std::vector<BlockFormat> formats;
  for (unsigned i = 0; i <= static_cast<unsigned>(BlockFormat::q2_0); ++i) {
    const auto format = static_cast<BlockFormat>(i);
    if (gguf_encoder(format) != nullptr) formats.push_back(format);
  }
  return formats;
}

std::string text(BlockFormat format) { return std::string(Encoding(format).name()); }

// ---- the same inputs as in tests/golden/make_gguf_encoded_goldens.py

constexpr std::uint64_t count = 65536;

float normal(std::uint64_t word) {
  std::int64_t sum = -131070;
  for (int i = 0; i < 4; ++i) sum += static_cast<std::int64_t>(word >> (16 * i) & 0xffff);
  return static_cast<float>(sum) * 0x1p-17f;
}

float of_bits(std::uint64_t word) {
  auto bits = static_cast<std::uint32_t>(word);
  if ((bits >> 23 & 0xff) == 0xff) bits &= 0x807fffffu;
  return std::bit_cast<float>(bits);
}

using Made = float (*)(std::uint64_t place, std::uint64_t word);

const std::map<std::string, Made>& cases() {
  static const std::map<std::string, Made> all = {
      {"normal", [](std::uint64_t, std::uint64_t word) { return normal(word); }},
      {"bits", [](std::uint64_t, std::uint64_t word) { return of_bits(word & 0xffffffff); }},
      {"scales",
       [](std::uint64_t place, std::uint64_t word) {
         return std::ldexp(normal(word), -static_cast<int>(splitmix(place / 16, 6) % 40));
       }},
      {"subnormal", [](std::uint64_t, std::uint64_t word) { return of_bits(word & 0x807fffff); }},
      {"outliers",
       [](std::uint64_t, std::uint64_t word) {
         return normal(word) * (word >> 56 == 0 ? 4096.0f : 1.0f);
       }},
      {"sparse",
       [](std::uint64_t, std::uint64_t word) {
         if (word >> 56 < 8) return normal(word);
         return (word >> 56 & 1) != 0 ? -0.0f : 0.0f;
       }},
      {"integers",
       [](std::uint64_t, std::uint64_t word) { return static_cast<float>((word >> 40) % 7) - 3; }},
      {"constants",
       [](std::uint64_t place, std::uint64_t) { return normal(splitmix(place / 64, 7)); }},
      {"positive", [](std::uint64_t, std::uint64_t word) { return std::abs(normal(word)) + 1; }},
      {"negative", [](std::uint64_t, std::uint64_t word) { return -(std::abs(normal(word)) + 1); }},
      {"huge", [](std::uint64_t, std::uint64_t word) { return std::ldexp(normal(word), 126); }},
      {"tiny", [](std::uint64_t, std::uint64_t word) { return std::ldexp(normal(word), -110); }},
      {"zeros", [](std::uint64_t, std::uint64_t) { return 0.0f; }},
  };
  return all;
}

Numbers numbers_of(const std::string& name) {
  Numbers numbers(count);
  const Made made = cases().at(name);
  for (std::uint64_t i = 0; i < count; ++i) numbers[i] = made(i, splitmix(i, 5));
  return numbers;
}

constexpr std::size_t columns = 1024;

// Grid formats are slow to encode, because the encoder searches a grid, so tests use fewer values.
bool is_of_grid(BlockFormat format) {
  const std::string name = text(format);
  return name.starts_with("IQ") && !name.starts_with("IQ4");
}

Numbers numbers_for(BlockFormat format, Numbers numbers) {
  if (is_of_grid(format)) numbers.resize(16 * columns);
  return numbers;
}

// Encodes with an importance of 1 for each column if the format requires an importance.
Bytes encode(BlockFormat format, const Numbers& numbers) {
  static const Numbers ones(count, 1.0f);
  const BlockImportance given = {ones.data(), 1.0f};
  const BlockLayout block = layout(format);
  Bytes blocks(numbers.size() / block.elements * block.bytes, std::byte{0xa5});
  gguf_encoder(format)(numbers.data(), numbers.size() / block.elements,
                       needs_importance(format) ? &given : nullptr, blocks.data());
  return blocks;
}

Numbers importance() {
  Numbers all(columns);
  for (std::size_t i = 0; i < columns; ++i) {
    const std::uint64_t word = splitmix(i, 11);
    all[i] = word % 8 == 0 ? 0.0f : static_cast<float>(word >> 40) * 0x1p-22f;
  }
  return all;
}

// Encodes one row at a time, because some formats compute sums over whole rows.
Bytes encode_weighted(BlockFormat format, const Numbers& numbers) {
  const BlockLayout block = layout(format);
  const Numbers weights = importance();
  Bytes blocks(numbers.size() / block.elements * block.bytes, std::byte{0xa5});
  for (std::size_t row = 0; row < numbers.size(); row += columns) {
    float sum = 0;
    for (std::size_t i = row; i < row + columns; ++i) sum += numbers[i] * numbers[i];
    const BlockImportance given = {weights.data(), sum / columns};
    gguf_encoder(format)(numbers.data() + row, columns / block.elements, &given,
                         blocks.data() + row / block.elements * block.bytes);
  }
  return blocks;
}

std::uint64_t fingerprint_of(const Numbers& numbers) {
  Bytes bytes(numbers.size() * sizeof(float));
  std::memcpy(bytes.data(), numbers.data(), bytes.size());
  return fingerprint(bytes);
}

TEST(GgufEncode, GivesTheBytesOfTheReference) {
  std::map<std::pair<std::string, std::string>, std::uint64_t> expected;
  std::ifstream file(LOADSTONE_GOLDEN_DIR "/gguf_encoded.txt");
  std::string format;
  std::string name;
  std::string hex;
  while (file >> format >> name >> hex) expected[{format, name}] = std::stoull(hex, nullptr, 16);
  std::size_t compared = 0;
  const auto compare = [&](BlockFormat one, const std::string& label, const auto& make) {
    const auto found = expected.find({text(one), label});
    if (found == expected.end()) return;
    EXPECT_EQ(fingerprint(make()), found->second) << text(one) << " " << label;
    ++compared;
  };
  for (const auto& [each, made] : cases()) {
    const Numbers all = numbers_of(each);
    ASSERT_EQ(fingerprint_of(all), expected.at({"-", each})) << each;
    ++compared;
    for (const BlockFormat one : encoded_formats()) {
      const Numbers numbers = numbers_for(one, all);
      if (!needs_importance(one)) compare(one, each, [&] { return encode(one, numbers); });
      compare(one, each + "-weighted", [&] { return encode_weighted(one, numbers); });
    }
  }
  for (const BlockFormat one : encoded_formats()) {
    EXPECT_TRUE(expected.contains({text(one), "normal-weighted"})) << text(one);
    EXPECT_NE(expected.contains({text(one), "normal"}), needs_importance(one)) << text(one);
  }
  EXPECT_EQ(compared, expected.size());
}

TEST(GgufEncode, TheFingerprintSeesOneNumber) {
  Numbers numbers = numbers_of("normal");
  numbers.resize(4 * columns);
  for (const BlockFormat format : encoded_formats()) {
    const std::uint64_t before = fingerprint(encode(format, numbers));
    const float kept = std::exchange(numbers[777], 1.5f);  // the largest value
    EXPECT_NE(fingerprint(encode(format, numbers)), before) << text(format);
    numbers[777] = kept;
  }
}

TEST(GgufEncode, EveryInstructionSetGivesTheSameBytes) {
  std::vector<EncodeBlocks> seen;
  std::map<BlockFormat, std::set<std::uint64_t>> seen_weighted;
  std::size_t compared = 0;
  for (const auto& [name, made] : cases()) {
    const Numbers all = numbers_of(name);
    for (const BlockFormat format : encoded_formats()) {
      Numbers numbers = all;
      if (is_of_grid(format)) numbers.resize(3 * columns + 256);
      const Bytes expected = encode(format, numbers);
      for (const std::int64_t isa : hwy::SupportedAndGeneratedTargets()) {
        const ForcedTarget forced(isa);
        if (name == "normal") seen.push_back(gguf_encoder(format));
        EXPECT_TRUE(encode(format, numbers) == expected)
            << text(format) << " of " << name << " on " << hwy::TargetName(isa);
        ++compared;
        if (name != "scales") continue;
        const Bytes weighted = encode_weighted(format, numbers_for(format, all));
        seen_weighted[format].insert(fingerprint(weighted));
      }
    }
  }
  const std::size_t sets = hwy::SupportedAndGeneratedTargets().size();
  EXPECT_EQ(compared, cases().size() * encoded_formats().size() * sets);
  for (const auto& [format, found] : seen_weighted) EXPECT_EQ(found.size(), 1u) << text(format);
  // Control: every instruction set was used.
  std::ranges::sort(seen);
  EXPECT_EQ(std::ranges::unique(seen).size(), 0u);
}

TEST(GgufEncode, EveryCutAndAddressGivesTheSameBytes) {
  std::mt19937 random(3);
  Numbers numbers = numbers_of("scales");
  numbers.resize(23 * 256);
  const Numbers weights(6 * 256, 1.0f);
  const BlockImportance ones = {weights.data(), 1.0f};
  for (const BlockFormat format : encoded_formats()) {
    const BlockLayout block = layout(format);
    const EncodeBlocks encoder = gguf_encoder(format);
    const Bytes expected = encode(format, numbers);
    for (std::size_t shift = 0; shift < 3; ++shift) {
      Bytes made(shift + expected.size() + 9, std::byte{0x5a});
      for (std::size_t at = 0; at < numbers.size() / block.elements;) {
        const std::size_t left = numbers.size() / block.elements - at;
        const std::size_t blocks = std::min<std::size_t>(random() % 6, left);
        encoder(numbers.data() + at * block.elements, blocks,
                needs_importance(format) ? &ones : nullptr, made.data() + shift + at * block.bytes);
        at += blocks;
      }
      ASSERT_EQ(std::memcmp(made.data() + shift, expected.data(), expected.size()), 0)
          << text(format);
      ASSERT_TRUE(std::all_of(made.end() - 9, made.end(),
                              [](std::byte byte) { return byte == std::byte{0x5a}; }));
    }
  }
}

// In each block, the error must be less than a step of the coarsest format.
TEST(GgufEncode, WhatIsDecodedIsNear) {
  const Numbers all = numbers_of("normal");
  for (const BlockFormat format : encoded_formats()) {
    const Numbers numbers = numbers_for(format, all);
    const BlockLayout block = layout(format);
    const Bytes blocks = encode(format, numbers);
    Numbers back(numbers.size());
    gguf_decoder(format, Dtype::f32, GgufMode::exact)(blocks.data(), blocks.size() / block.bytes,
                                                      reinterpret_cast<std::byte*>(back.data()));
    double error = 0;
    double power = 0;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      error += std::pow(double{numbers[i]} - back[i], 2);
      power += std::pow(double{numbers[i]}, 2);
    }
    const bool is_ternary = format == BlockFormat::tq1_0 || format == BlockFormat::tq2_0;
    // A code with three levels carries log2(3) bits, whatever its storage size.
    const double bits = is_ternary ? std::log2(3.0) : 8.0 * block.bytes / block.elements;
    EXPECT_LT(error / power, 1.2 * std::pow(4.0, 1.5 - bits)) << text(format);
    EXPECT_GT(error, 0) << text(format);  // control
  }
}

TEST(GgufEncode, TheTableSaysWhatThereIs) {
  EXPECT_EQ(gguf_encoder(BlockFormat::q8_1), nullptr);
  EXPECT_EQ(gguf_encoder(BlockFormat::q8_k), nullptr);
  EXPECT_NE(gguf_encoder(BlockFormat::q8_0), nullptr);
}

}  // namespace
}  // namespace loadstone
