#include "kernels/gguf.h"

#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/cast.h"
#include "kernels/forced_target.h"
#include "kernels/gguf/block_scales.h"
#include "kernels/gguf_reference.h"
#include "kernels/golden_words.h"
#include "kernels/number.h"

namespace loadstone {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::array targets = {Dtype::f32, Dtype::bf16, Dtype::f16};
constexpr std::array modes = {GgufMode::exact, GgufMode::half};

std::vector<BlockFormat> all_formats() {
  std::vector<BlockFormat> formats;
  for (unsigned i = 0; i <= static_cast<unsigned>(BlockFormat::q2_0); ++i) {
    formats.push_back(static_cast<BlockFormat>(i));
  }
  return formats;
}

std::string text(BlockFormat format) { return std::string(Encoding(format).name()); }

// ---- the same blocks and fingerprints as in tests/golden/make_gguf_goldens.py

constexpr std::uint64_t pattern_count = 65536;  // all patterns of a 16-bit scale

Bytes blocks_of(BlockFormat format) {
  const std::size_t size = layout(format).bytes;
  Bytes blocks(pattern_count * size + 8);
  for (std::size_t at = 0; at < pattern_count * size; at += 8) {
    const std::uint64_t word = splitmix(at / 8, 7);
    std::memcpy(blocks.data() + at, &word, 8);
  }
  blocks.resize(pattern_count * size);
  const std::vector<std::size_t> places = reference::half_places(format);
  for (std::size_t place = 0; place < places.size(); ++place) {
    for (std::uint64_t i = 0; i < pattern_count; ++i) {
      const auto half = static_cast<std::uint16_t>(i * (place == 0 ? 1u : 40503u));
      std::memcpy(blocks.data() + i * size + places[place], &half, 2);
    }
  }
  return blocks;
}

bool is_half_nan(const std::byte* half) {
  std::uint16_t bits = 0;
  std::memcpy(&bits, half, 2);
  return (bits & 0x7fffu) > 0x7c00u;
}

// Sets one of two scales to 1 if both are NaN, because the F16 sum of two NaNs depends on the
// platform.
Bytes without_two_nans(BlockFormat format, Bytes blocks) {
  const std::vector<std::size_t> places = reference::half_places(format);
  if (places.size() < 2) return blocks;
  for (std::size_t at = 0; at < blocks.size(); at += layout(format).bytes) {
    std::byte* const first = blocks.data() + at + places[0];
    std::byte* const second = blocks.data() + at + places[1];
    if (!is_half_nan(first) && !is_half_nan(second)) continue;
    std::byte* const other = is_half_nan(first) ? second : first;
    other[0] = std::byte{0x00};
    other[1] = std::byte{0x3c};
  }
  return blocks;
}

Bytes decode(DecodeBlocks decoder, BlockFormat format, Dtype target, const Bytes& blocks) {
  const std::uint64_t count = blocks.size() / layout(format).bytes;
  Bytes result(count * layout(format).elements * element_bytes(target));
  decoder(blocks.data(), count, result.data());
  return result;
}

using Key = std::tuple<std::string, std::string, std::string>;

std::map<Key, std::uint64_t> goldens() {
  std::map<Key, std::uint64_t> goldens;
  std::ifstream file(LOADSTONE_GOLDEN_DIR "/gguf.txt");
  std::string format;
  std::string mode;
  std::string target;
  std::string hex;
  while (file >> format >> mode >> target >> hex) {
    goldens[{format, mode, target}] = std::stoull(hex, nullptr, 16);
  }
  return goldens;
}

TEST(GgufTest, EveryFormatGivesTheBitsOfItsReference) {
  const auto expected = goldens();
  std::size_t compared = 0;
  for (const BlockFormat format : all_formats()) {
    const auto input = expected.find({text(format), "-", "-"});
    if (input == expected.end()) continue;  // Python has no reference for this format
    const Bytes blocks = blocks_of(format);
    ASSERT_EQ(fingerprint(blocks), input->second) << text(format);
    for (const GgufMode mode : modes) {
      const std::string mode_name = mode == GgufMode::exact ? "exact" : "half";
      const Bytes given = mode == GgufMode::half ? without_two_nans(format, blocks) : blocks;
      for (const Dtype target : targets) {
        const DecodeBlocks decoder = gguf_decoder(format, target, mode);
        const auto golden = expected.find({text(format), mode_name, std::string(name(target))});
        ASSERT_EQ(decoder != nullptr, golden != expected.end()) << text(format) << mode_name;
        if (decoder == nullptr) continue;
        EXPECT_EQ(fingerprint(decode(decoder, format, target, given)), golden->second)
            << text(format) << " " << mode_name << " " << name(target);
        ++compared;
      }
    }
  }
  EXPECT_EQ(compared + 23, expected.size());
}

TEST(GgufTest, TheFingerprintSeesOneCode) {
  Bytes blocks = blocks_of(BlockFormat::q4_k);
  const DecodeBlocks decoder = gguf_decoder(BlockFormat::q4_k, Dtype::bf16, GgufMode::exact);
  const auto before = fingerprint(decode(decoder, BlockFormat::q4_k, Dtype::bf16, blocks));
  blocks[144 * 0x3c00 + 77] ^= std::byte{8};  // changes a block whose scale is 1
  EXPECT_NE(fingerprint(decode(decoder, BlockFormat::q4_k, Dtype::bf16, blocks)), before);
}

// ---- comparisons with a plain loop over single values

float rounded(float value, bool to_f16) {
  if (!to_f16) return value;
  const std::uint16_t half = number::f16_from_f32(std::bit_cast<std::uint32_t>(value));
  return std::bit_cast<float>(number::f32_from_f16(half));
}

// Computes value `i` by the reference. The fingerprints above check NaN payloads.
float plain_value(BlockFormat format, const std::byte* block, std::size_t i, GgufMode mode) {
  const auto term = reference::term_of(format, block, i);
  const bool is_half = mode == GgufMode::half;
  const bool sums_in_f32 = format == BlockFormat::iq4_nl || format == BlockFormat::iq4_xs;
  const float scale = rounded(term->scale * static_cast<float>(term->factor), is_half);
  const float product = rounded(scale * static_cast<float>(term->code), is_half && !sums_in_f32);
  if (term->minimum_factor == 0 && term->minimum == 0.0f) return product;
  const float minimum = rounded(term->minimum * static_cast<float>(term->minimum_factor), is_half);
  return rounded(product - minimum, is_half);
}

template <Dtype target>
void expect_plain_values(BlockFormat format, GgufMode mode, const Bytes& blocks) {
  const DecodeBlocks decoder = gguf_decoder(format, target, mode);
  if (decoder == nullptr) return;
  const Bytes result = decode(decoder, format, target, blocks);
  const BlockLayout block = layout(format);
  for (std::size_t i = 0; i < result.size() / element_bytes(target); ++i) {
    const std::byte* from = blocks.data() + i / block.elements * block.bytes;
    const float value = plain_value(format, from, i % block.elements, mode);
    std::array<std::byte, number::bytes_of<target>> expected{};
    number::store<target>(expected.data(), value, number::bf16_nan_vector);
    const std::byte* const found = result.data() + i * element_bytes(target);
    if (value != value) {
      const auto number = static_cast<float>(number::load<target>(found));
      ASSERT_NE(number, number) << text(format) << " at " << i;
    } else {
      ASSERT_EQ(std::memcmp(found, expected.data(), expected.size()), 0)
          << text(format) << " at " << i << ": " << value;
    }
  }
}

TEST(GgufTest, EveryNumberIsThatOfAPlainLoop) {
  std::size_t formats = 0;
  for (const BlockFormat format : all_formats()) {
    if (gguf_decoder(format, Dtype::f32, GgufMode::exact) == nullptr) continue;
    const Bytes blocks = blocks_of(format);
    const std::size_t kept = 4 * layout(format).bytes;  // from every 512 blocks
    Bytes some;
    for (std::size_t at = 0; at + kept <= blocks.size(); at += 512 * layout(format).bytes) {
      const auto first = blocks.begin() + static_cast<std::ptrdiff_t>(at);
      some.insert(some.end(), first, first + static_cast<std::ptrdiff_t>(kept));
    }
    for (const GgufMode mode : modes) {
      expect_plain_values<Dtype::f32>(format, mode, some);
      expect_plain_values<Dtype::bf16>(format, mode, some);
      expect_plain_values<Dtype::f16>(format, mode, some);
    }
    ++formats;
  }
  EXPECT_EQ(formats, 25u);
}

TEST(GgufTest, BlocksWhoseScalesAreZeroDecodeToZeros) {
  for (const BlockFormat format : all_formats()) {
    const DecodeBlocks decoder = gguf_decoder(format, Dtype::f32, GgufMode::exact);
    if (decoder == nullptr) continue;
    const Bytes blocks = blocks_of(format);
    const std::size_t size = layout(format).bytes;
    std::size_t count = 0;
    std::vector<float> values(layout(format).elements);
    for (std::size_t at = 0; at < blocks.size(); at += size) {
      if (!has_zero_scales(format, blocks.data() + at)) continue;
      ++count;
      decoder(blocks.data() + at, 1, reinterpret_cast<std::byte*>(values.data()));
      EXPECT_EQ(std::ranges::count(values, 0.0f), std::ssize(values)) << text(format);
    }
    // The scales of 0 and -0. IQ1_M's scale is random.
    const bool has_halves = !reference::half_places(format).empty();
    if (format == BlockFormat::iq1_m) continue;
    EXPECT_EQ(count, has_halves ? 2u : 0u) << text(format);
  }
}

// ---- lengths, addresses, instruction sets

TEST(GgufTest, EveryLengthAndAddressStaysInside) {
  for (const BlockFormat format : all_formats()) {
    for (const Dtype target : targets) {
      const DecodeBlocks decoder = gguf_decoder(format, target, GgufMode::exact);
      if (decoder == nullptr) continue;
      const BlockLayout block = layout(format);
      Bytes blocks = blocks_of(format);
      blocks.resize(20 * block.bytes);
      const Bytes expected = decode(decoder, format, target, blocks);
      for (std::size_t count = 0; count <= 20; ++count) {
        const std::size_t bytes = count * block.elements * element_bytes(target);
        for (std::size_t shift = 0; shift < 3; ++shift) {
          Bytes from(shift + count * block.bytes);
          std::copy_n(blocks.begin(), count * block.bytes,
                      from.begin() + static_cast<std::ptrdiff_t>(shift));
          Bytes to(shift + bytes + 9, std::byte{0x5a});
          decoder(from.data() + shift, count, to.data() + shift);
          ASSERT_EQ(std::memcmp(to.data() + shift, expected.data(), bytes), 0) << text(format);
          ASSERT_TRUE(std::all_of(to.end() - 9, to.end(),
                                  [](std::byte byte) { return byte == std::byte{0x5a}; }));
        }
      }
    }
  }
}

TEST(GgufTest, EveryInstructionSetGivesTheSameBytes) {
  std::size_t compared = 0;
  std::vector<DecodeBlocks> seen;
  for (const BlockFormat format : all_formats()) {
    Bytes blocks = blocks_of(format);
    const std::size_t size = layout(format).bytes;
    // The scales range from the largest finite values through infinities to NaNs, and on to small
    // negative values.
    blocks.erase(blocks.begin(), blocks.begin() + static_cast<std::ptrdiff_t>(0x7b00 * size));
    blocks.resize(0x600 * size);
    for (const Dtype target : targets) {
      for (const GgufMode mode : modes) {
        const DecodeBlocks best = gguf_decoder(format, target, mode);
        if (best == nullptr) continue;
        const Bytes expected = decode(best, format, target, blocks);
        for (const std::int64_t isa : hwy::SupportedAndGeneratedTargets()) {
          const ForcedTarget forced(isa);
          const DecodeBlocks decoder = gguf_decoder(format, target, mode);
          seen.push_back(decoder);
          EXPECT_TRUE(decode(decoder, format, target, blocks) == expected)
              << text(format) << " to " << name(target) << " on " << hwy::TargetName(isa);
          ++compared;
        }
      }
    }
  }
  // 25 formats are decoded in exact mode and 12 in half mode, each to 3 dtypes. Control: every
  // instruction set was used.
  EXPECT_EQ(compared, 37 * 3 * hwy::SupportedAndGeneratedTargets().size());
  std::ranges::sort(seen);
  EXPECT_EQ(std::ranges::unique(seen).size(), 0u);
}

TEST(GgufTest, TheTableSaysWhatThereIs) {
  for (const GgufMode mode : modes) {
    EXPECT_EQ(gguf_decoder(BlockFormat::q8_1, Dtype::f32, mode), nullptr);
    EXPECT_EQ(gguf_decoder(BlockFormat::q8_k, Dtype::f32, mode), nullptr);
    EXPECT_EQ(gguf_decoder(BlockFormat::q4_0, Dtype::f64, mode), nullptr);
    EXPECT_NE(gguf_decoder(BlockFormat::q4_0, Dtype::f32, mode), nullptr);
  }
  EXPECT_EQ(gguf_decoder(BlockFormat::iq1_s, Dtype::f32, GgufMode::half), nullptr);
}

}  // namespace
}  // namespace loadstone
