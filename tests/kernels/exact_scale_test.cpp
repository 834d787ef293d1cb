// Tests exact scales: decoded codes must be encoded so that they decode to the same values. Other
// values must give the same bytes as without the search for exact scales.
#include "kernels/exact_scale.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "codec/encode.h"
#include "kernels/encoding_loss.h"
#include "kernels/exact_matrix_scale.h"
#include "kernels/forced_target.h"
#include "kernels/number.h"
#include "kernels/quantize.h"

namespace loadstone {
namespace {

using Bytes = std::vector<std::byte>;
using Numbers = std::vector<float>;
using Random = std::mt19937;

struct Case {
  std::string encoding;
  Shape shape;
};

// Includes short blocks and stacks if the encoding allows them.
const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"fp8", {2, 37, 41}},
      {"fp8-channel", {3, 19, 77}},
      {"fp8-block", {300, 200}},
      {"fp8-block", {3, 130, 131}},
      {"int8-channel", {3, 19, 77}},
      {"int4", {2, 6, 192}},
      {"int4-packed", {5, 384}},
      {"int4-packed-32", {3, 96}},
      {"int4-awq", {3, 10, 256}},
      {"nvfp4", {3, 20, 48}},
      {"nvfp4", {2, 21, 37}},
      {"mxfp4", {2, 11, 96}},
      {"mxfp8", {23, 45}},
      {"q4_0", {3, 11, 96}},
      {"q4_1", {20, 64}},
      {"q5_0", {20, 64}},
      {"q5_1", {20, 64}},
      {"q8_0", {2, 11, 96}},
      {"iq4_nl", {20, 64}},
      {"mxfp4-gguf", {20, 64}},
      {"nvfp4-gguf", {3, 20, 64}},
      {"tq1_0", {5, 768}},
      {"tq2_0", {5, 768}},
  };
  return all;
}

QuantizedLayout form_of(const Case& one, bool exact_first = true) {
  QuantizedLayout form;
  Quantization quantization;
  quantization.encoding = one.encoding;
  quantization.exact_first = exact_first;
  const auto problem = prepare_quantization(quantization, one.shape, Dtype::f32, form);
  EXPECT_FALSE(problem) << one.encoding << ": " << problem->message;
  return form;
}

struct Parts {
  std::vector<Bytes> bytes;

  explicit Parts(const QuantizedLayout& form) {
    for (const QuantizedPart& part : form.parts) bytes.emplace_back(part.byte_count());
  }
  template <class Byte = std::byte>
  std::vector<Byte*> places(std::span<const PartRange> ranges) {
    std::vector<Byte*> found;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      found.push_back(bytes[i].data() + ranges[i].begin);
    }
    return found;
  }
  friend bool operator==(const Parts&, const Parts&) = default;
};

float positive(Random& random, int least, int most) {
  const float significand = 1 + static_cast<float>(random() % (1u << 23)) * 0x1p-23f;
  return std::ldexp(significand, least + static_cast<int>(random() % (most - least + 1)));
}

std::byte random_byte(Random& random) { return static_cast<std::byte>(random() & 0xff); }

void store_half(float value, std::byte* to) {
  number::store_raw(to, number::f16_from_f32(std::bit_cast<std::uint32_t>(value)));
}

// Makes the scales of a block of GGUF valid. The other bytes may be anything.
void set_block_scales(BlockFormat format, Random& random, std::byte* block) {
  const float sign = random() % 2 == 0 ? 1.0f : -1.0f;
  const float scale = sign * positive(random, -12, 3);
  switch (format) {
    case BlockFormat::mxfp4:
      block[0] = static_cast<std::byte>(random() % 251);
      return;
    case BlockFormat::q4_1:
    case BlockFormat::q5_1:
      store_half(scale, block);
      store_half(scale * static_cast<float>(random() % 8) - 0.5f, block + 2);
      return;
    case BlockFormat::tq1_0:
      return store_half(scale, block + 52);
    case BlockFormat::tq2_0:
      for (std::byte* at = block; at < block + 64; ++at) {
        *at ^= *at & (*at >> 1) & std::byte{0x55};  // encoders do not write the code 3
      }
      return store_half(scale, block + 64);
    default:
      return store_half(scale, block);
  }
}

// Returns random codes and scales of an encoding.
Parts random_parts(const QuantizedLayout& form, Random& random) {
  Parts parts(form);
  for (Bytes& bytes : parts.bytes) {
    std::ranges::generate(bytes, [&] { return random_byte(random); });
  }
  if (form.kind == QuantizeKind::gguf_blocks) {
    const BlockLayout block = layout(form.block);
    for (std::size_t at = 0; at < parts.bytes[0].size(); at += block.bytes) {
      set_block_scales(form.block, random, parts.bytes[0].data() + at);
    }
    return parts;
  }
  for (std::size_t i = 0; i < parts.bytes.size(); ++i) {
    Bytes& bytes = parts.bytes[i];
    const Dtype dtype = form.parts[i].dtype;
    for (std::size_t at = 0; at < bytes.size(); at += element_bytes(dtype)) {
      const auto byte = std::to_integer<unsigned>(bytes[at]);
      if (dtype == Dtype::f32) number::store_raw(bytes.data() + at, positive(random, -20, 4));
      if (dtype == Dtype::f8_e4m3 && byte % 128 == 127) bytes[at] ^= std::byte{1};
      if (dtype == Dtype::f8_e4m3 && i == 1) bytes[at] = std::byte(1 + byte % 126);
      if (dtype == Dtype::u8 && i == 1) bytes[at] = std::byte(90 + byte % 60);
      // The first four bytes of a block are scales.
      const bool is_scale = form.kind == QuantizeKind::nvfp4_gguf && i == 0 && at % 36 < 4;
      if (is_scale) bytes[at] = std::byte(1 + byte % 126);
    }
  }
  return parts;
}

Numbers decoded(const QuantizedLayout& form, Parts parts) {
  const std::vector<PartRange> all(form.parts.size());
  const auto places = parts.places<const std::byte>(all);
  Numbers numbers(form.elements);
  dequantize_window(form, 0, form.elements, places, Dtype::f32,
                    reinterpret_cast<std::byte*>(numbers.data()));
  return numbers;
}

// Encodes window by window: the first window last.
Parts encoded(const QuantizedLayout& form, const Numbers& numbers, std::uint64_t length) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> windows;
  for (std::uint64_t at = 0; at < form.elements; at += length) {
    windows.emplace_back(at, std::min(at + length, form.elements));
  }
  std::ranges::reverse(windows);
  const auto from = [&](std::uint64_t at) {
    return reinterpret_cast<const std::byte*>(numbers.data() + at);
  };
  Numbers amax(form.needs_amax ? form.stack : 0);
  std::vector<ExactScales> joined(form.exact_first ? amax.size() : 0);
  for (const auto& [begin, end] : windows) {
    if (!form.needs_amax) break;
    std::vector<ExactScales> exact(joined.size());
    EXPECT_EQ(measure_window(form, begin, end, from(begin), amax, exact), end);
    for (std::size_t i = 0; i < exact.size(); ++i) joined[i].join(exact[i]);
  }
  Numbers scales;
  for (std::size_t i = 0; i < joined.size(); ++i) {
    scales.push_back(exact_matrix_scale(form, amax[i], joined[i]));
  }
  Parts parts(form);
  std::vector<PartRange> ranges(form.parts.size());
  for (const auto& [begin, end] : windows) {
    part_ranges(form, begin, end, ranges);
    EXPECT_EQ(
        quantize_window(form, begin, end, from(begin), parts.places(ranges), amax, nullptr, scales),
        end);
  }
  ranges.assign(form.parts.size(), {});
  finish_quantized(form, parts.places(ranges), amax, nullptr, scales);
  return parts;
}

TEST(ExactScale, DecodedCodesAreEncodedExactly) {
  Random random(3);
  for (const Case& one : cases()) {
    const QuantizedLayout form = form_of(one);
    for (int turn = 0; turn < 10; ++turn) {
      const Numbers numbers = decoded(form, random_parts(form, random));
      const Parts parts = encoded(form, numbers, form.elements);
      EXPECT_EQ(decoded(form, parts), numbers) << one.encoding << " " << turn;
      EXPECT_EQ(encoded(form, numbers, form.window_elements), parts) << one.encoding;
    }
  }
}

TEST(ExactScale, EveryInstructionSetFindsTheSameScales) {
  for (const Case& one : cases()) {
    const QuantizedLayout form = form_of(one);
    Random random(5);
    const Numbers numbers = decoded(form, random_parts(form, random));
    const Parts parts = encoded(form, numbers, form.elements);
    for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
      const ForcedTarget forced(target);
      EXPECT_EQ(encoded(form, numbers, form.elements), parts) << one.encoding << " " << target;
    }
  }
}

TEST(ExactScale, ValuesWithoutAnExactScaleGetTheUsualOne) {
  Random random(7);
  std::normal_distribution<float> normal;
  for (const Case& one : cases()) {
    const QuantizedLayout form = form_of(one);
    const QuantizedLayout usual = form_of(one, false);
    Numbers numbers(form.elements);
    std::ranges::generate(numbers, [&] { return normal(random); });
    EXPECT_EQ(encoded(form, numbers, form.elements), encoded(usual, numbers, form.elements))
        << one.encoding;
  }
}

// A scale that encodes one block exactly must not change the others.
TEST(ExactScale, BlocksAreSeparate) {
  Random random(9);
  std::normal_distribution<float> normal;
  for (const Case& one : cases()) {
    const QuantizedLayout form = form_of(one);
    if (form.needs_amax) continue;
    const Numbers exact = decoded(form, random_parts(form, random));
    Numbers numbers = exact;
    const std::uint64_t half = form.window_elements;
    if (half == form.elements) continue;
    for (std::uint64_t i = half; i < numbers.size(); ++i) numbers[i] = normal(random);
    const Numbers found = decoded(form, encoded(form, numbers, form.elements));
    EXPECT_TRUE(
        std::equal(exact.begin(), exact.begin() + static_cast<std::ptrdiff_t>(half), found.begin()))
        << one.encoding;
  }
}

// Returns the loss, measured window by window.
EncodingLoss loss_of(const QuantizedLayout& form, const Numbers& values, const Numbers& found,
                     std::uint64_t length) {
  EncodingLoss loss;
  Numbers errors(compared_matrices(form));
  Numbers amax(form.stack);
  for (std::uint64_t at = 0; at < form.elements; at += length) {
    const std::uint64_t end = std::min(at + length, form.elements);
    compare_window(form, at, end, values.data() + at, found.data() + at, errors, loss);
  }
  for (std::uint64_t i = 0; i < form.elements; ++i) {
    float& most = amax[i / form.matrix_elements()];
    most = std::max(most, std::abs(values[i]));
  }
  count_matrices(errors, amax, loss);
  return loss;
}

TEST(EncodingLoss, CountsBlocks) {
  Random random(13);
  std::normal_distribution<float> normal;
  for (const Case& one : cases()) {
    const QuantizedLayout form = form_of(one);
    Numbers numbers(form.elements);
    std::ranges::generate(numbers, [&] { return normal(random); });
    const EncodingLoss none = loss_of(form, numbers, numbers, form.elements);
    EXPECT_EQ(none.blocks, none.exact_blocks);
    EXPECT_EQ(none.largest_error, 0) << one.encoding;
    std::uint64_t scales = form.stack;
    if (form.kind == QuantizeKind::gguf_blocks) {
      scales = form.elements / layout(form.block).elements;
    } else if (form.kind == QuantizeKind::nvfp4_gguf) {
      scales = form.elements / 16;
    } else if (form.kind != QuantizeKind::fp8) {
      scales = form.parts[1].shape.numel().value();
    }
    EXPECT_EQ(none.blocks, scales) << one.encoding;
    Numbers found = numbers;
    found.back() = numbers.back() * 2;  // in the last block
    const EncodingLoss loss = loss_of(form, numbers, found, form.window_elements);
    EXPECT_EQ(loss.blocks, scales) << one.encoding;
    EXPECT_EQ(loss.exact_blocks, scales - 1) << one.encoding;
    EXPECT_GT(loss.largest_error, 0) << one.encoding;
    EXPECT_LE(loss.largest_error, 1) << one.encoding;
  }
}

std::optional<float> scale_of(BlockArithmetic block, const Numbers& values) {
  return exact_scale(block, {values.data(), values.size()});
}

TEST(ExactScale, OfSpecialBlocks) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  constexpr BlockArithmetic fp8 = {};
  EXPECT_FALSE(scale_of(fp8, {0.0f, -0.0f, 0.0f}));
  EXPECT_FALSE(scale_of(fp8, {1.0f, infinity}));
  EXPECT_FALSE(scale_of(fp8, {1.0f, std::numeric_limits<float>::quiet_NaN()}));
  EXPECT_FALSE(scale_of(fp8, {1.0f, 1.0625f}));  // 17 / 16 has five bits
  EXPECT_EQ(scale_of(fp8, {0.0f, -3.5f}), 3.5f / 448);
  EXPECT_EQ(scale_of(fp8, {1.875f, 1.0f}), 0x1p-7f);  // 480 is not a code
  EXPECT_EQ(scale_of(fp8, {448 * 0x1p-9f, 0x1p-9f}), 0x1p-9f);
  EXPECT_FALSE(scale_of(fp8, {448.0f, 0x1p-10f}));  // beyond the subnormal codes
  EXPECT_EQ(scale_of(fp8, {448 * 0x1p-140f}), 0x1p-140f);
  EXPECT_EQ(scale_of(fp8, {1.75f * 0x1p127f, 0x1p120f}), 0x1p119f);
}

TEST(ExactScale, IntegersReachTheirNegativeLimit) {
  constexpr BlockArithmetic q4_0 = {
      .codes = CodeSet::int4, .scale = Dtype::f16, .has_signed_scale = true};
  constexpr BlockArithmetic packed = {.codes = CodeSet::int4, .has_signed_scale = true};
  constexpr BlockArithmetic q8 = {.codes = CodeSet::int8};
  EXPECT_EQ(scale_of(q4_0, {-8.0f, 7.0f}), 1.0f);
  EXPECT_EQ(scale_of(q4_0, {8.0f, -7.0f}), -1.0f);
  EXPECT_FALSE(scale_of(q4_0, {8.0f, -8.0f, 7.0f}));
  EXPECT_EQ(scale_of(q8, {-128.0f, 127.0f}), 1.0f);
  EXPECT_FALSE(scale_of(q8, {128.0f, -127.0f}));  // its scales are positive
  EXPECT_EQ(scale_of(packed, {8 * 0.3f, -7 * 0.3f}), -0.3f);
  EXPECT_EQ(scale_of(packed, {-8 * 0.3f, 7 * 0.3f}), 0.3f);
  EXPECT_FALSE(scale_of(q4_0, {0x1p-25f}));  // below the smallest F16
  EXPECT_EQ(scale_of(q4_0, {7 * 0x1p-24f, 0x1p-24f}), 0x1p-24f);
}

TEST(ExactScale, OfAffineBlocks) {
  const auto of = [](const Numbers& values) { return exact_affine(15, values); };
  EXPECT_EQ(of({0.25f, 0.25f})->minimum, 0.25f);
  // 0.1 is not an F16, but 5 * 0.02 may be: here 3 * (1 + 2^-10) / 2.
  const float odd = 3 * (1 + 0x1p-10f) / 2;
  ASSERT_TRUE(of({odd, odd}));
  EXPECT_EQ(of({odd, odd})->minimum, 0.0f);
  EXPECT_FALSE(of({0.0f, 0.0f}).has_value() && of({0.0f, 0.0f})->scale != 0);
  EXPECT_FALSE(of({0.1f, 0.2f, 0.35f}));
  const auto shifted = of({-7 * 0.0625f, 8 * 0.0625f, 0.0f});
  ASSERT_TRUE(shifted);
  EXPECT_EQ(shifted->scale, 0.0625f);
}

float scale_of_matrix(const std::vector<Numbers>& blocks, bool is_reversed = false) {
  std::vector<ExactScales> sets(blocks.size());
  for (std::size_t i = 0; i < blocks.size(); ++i) sets[i].add_block(blocks[i]);
  if (is_reversed) std::ranges::reverse(sets);
  ExactScales all;
  for (const ExactScales& each : sets) all.join(each);
  return all.scale(0, false);
}

TEST(ExactMatrixScale, IsAPowerOfTwoIfPossible) {
  const Numbers small = {0x1p-10f, 1.5f * 0x1p-10f};
  const Numbers large = {6.0f, 0.5f};
  const Numbers zeros = {0.0f, 0.0f};
  EXPECT_EQ(scale_of_matrix({small, large, zeros}), 0x1p-8f);
  EXPECT_EQ(scale_of_matrix({small, large, zeros}, true), 0x1p-8f);
  EXPECT_EQ(scale_of_matrix({zeros}), 0.0f);
  const Numbers other = {0.1f, 0.11f};  // not codes: this block is left out
  EXPECT_EQ(scale_of_matrix({other, large}), 0x1p-8f);
}

// 6 times a block's scale is rounded up here, so the quotient by 6 is above 448 times the scale.
TEST(ExactMatrixScale, ReachesTheLargestBlock) {
  for (const std::uint32_t bits : {7051540u, 8224588u}) {
    const float scale = std::bit_cast<float>(0x3f800000u | (bits & 0x7fffffu));
    ExactScales set;
    for (const float code : {448.0f, 0x1p-9f, 5 * 0x1p-9f}) {
      const float block = code * scale;
      set.add_block(Numbers{6 * block, 4 * block, block / 2});
    }
    const QuantizedLayout form = form_of({"nvfp4", {3, 16}});
    EXPECT_EQ(exact_matrix_scale(form, 6 * (448 * scale), set), scale);
  }
}

TEST(ExactMatrixScale, DoesNotDependOnTheOrder) {
  Random random(11);
  for (int turn = 0; turn < 200; ++turn) {
    const float scale = positive(random, -9, 9);
    std::vector<Numbers> blocks;
    for (int i = 0; i < 6; ++i) {
      const float code =
          static_cast<float>(8 + random() % 8) * std::ldexp(1.0f, -static_cast<int>(random() % 6));
      const float block = code * scale;
      blocks.push_back({6 * block, static_cast<float>(random() % 5) * block});
    }
    const float found = scale_of_matrix(blocks);
    EXPECT_GT(found, 0);
    EXPECT_EQ(scale_of_matrix(blocks, true), found);
  }
}

TEST(ExactMatrixScale, OfValuesNeedsAllOfThem) {
  const auto of = [](const Numbers& values) {
    ExactScales set;
    set.add_values(values);
    return set.scale(0, true);
  };
  EXPECT_EQ(of({448.0f, 0x1p-9f, 0.0f}), 1.0f);
  EXPECT_EQ(of({448.0f, 0x1p-10f}), 0.0f);
  EXPECT_EQ(of({224.0f, 0x1p-10f}), 0.5f);
  EXPECT_EQ(of({240.0f, 0x1p-10f}), 0.0f);  // 480 is not a code
  EXPECT_EQ(of({1.0f, 1.0625f}), 0.0f);
  EXPECT_EQ(of({1.0f, 0x1p-140f}), 0.0f);
  EXPECT_EQ(of({}), 0.0f);
}

}  // namespace
}  // namespace loadstone
