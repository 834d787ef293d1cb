#include "kernels/gguf.h"

#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/cast.h"
#include "kernels/gguf_reference.h"

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

// ---- the blocks and fingerprints of tests/golden/make_gguf_goldens.py

std::uint64_t splitmix(std::uint64_t place, std::uint64_t seed) {
  std::uint64_t word = (place + 1) * 0x9e3779b97f4a7c15u + seed;
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
  return word ^ (word >> 31);
}

std::uint64_t fingerprint(const Bytes& bytes) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < bytes.size() / 8; ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + 8 * i, 8);
    sum += (word + 1) * (splitmix(i, 99) | 1);
  }
  return sum;
}

constexpr std::uint64_t pattern_count = 65536;  // each pattern of a scale of 16 bits

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

// Which of two NaNs a sum of F16 takes is not the same everywhere: where one of two scales is NaN,
// the other is made 1.
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
    if (input == expected.end()) continue;  // no reference in Python
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

// The control: one bit of one code is seen.
TEST(GgufTest, TheFingerprintSeesOneCode) {
  Bytes blocks = blocks_of(BlockFormat::q4_k);
  const DecodeBlocks decoder = gguf_decoder(BlockFormat::q4_k, Dtype::bf16, GgufMode::exact);
  const auto before = fingerprint(decode(decoder, BlockFormat::q4_k, Dtype::bf16, blocks));
  blocks[144 * 0x3c00 + 77] ^= std::byte{8};  // a block whose scale is 1
  EXPECT_NE(fingerprint(decode(decoder, BlockFormat::q4_k, Dtype::bf16, blocks)), before);
}

}  // namespace
}  // namespace loadstone
