// Tests the inverse of NVFP4's global scale, the only value that repacking computes, and the
// tensors that GGUF files keep.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "codec/block_grid.h"
#include "kernels/cast.h"
#include "loadstone/convert.h"
#include "support/files.h"
#include "support/samples.h"

namespace loadstone::test {
namespace {

float scale(unsigned code) {
  const auto byte = static_cast<std::byte>(code);
  float value = 0;
  cast_between(Dtype::f8_e4m3, Dtype::f32).run(&byte, reinterpret_cast<std::byte*>(&value), 1);
  return value;
}

TEST(Repack, AnInverseChangesNoScaleOrThereIsNone) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> exponents(-20, 2);
  int found = 0;
  constexpr int count = 1000;
  for (int i = 0; i < count; ++i) {
    const float factor = std::exp2(exponents(random));
    const auto divisor = same_divisor(factor);
    if (!divisor) continue;
    ++found;
    for (unsigned code = 1; code < 127; ++code) {
      ASSERT_EQ(scale(code) * factor, scale(code) / *divisor) << factor;
    }
    const auto back = same_factor(*divisor);
    ASSERT_TRUE(back.has_value()) << factor;
    for (unsigned code = 1; code < 127; ++code) {
      ASSERT_EQ(scale(code) * *back, scale(code) * factor) << factor;
    }
  }
  EXPECT_GT(found, count / 20);  // most values have no exact inverse
  EXPECT_LT(found, count / 2);
}

TEST(Repack, PowersOfTwoHaveTheirInverse) {
  for (int exponent = -100; exponent < 100; ++exponent) {
    EXPECT_EQ(same_divisor(std::ldexp(1.0f, exponent)), std::ldexp(1.0f, -exponent));
    EXPECT_EQ(same_factor(std::ldexp(1.0f, exponent)), std::ldexp(1.0f, -exponent));
  }
}

TEST(Repack, TheNearestInverseChangesScalesByARounding) {
  for (const float factor : {0.0123f, 3e-5f}) {
    ASSERT_EQ(same_divisor(factor), std::nullopt) << factor;
    const double change = change_of_scales(factor, 1.0f / factor);
    EXPECT_GT(change, 0) << factor;
    EXPECT_LT(change, 3 * 0x1p-23) << factor;
  }
  EXPECT_EQ(change_of_scales(0.25f, 4.0f), 0);
}

TEST(Repack, WhatIsNoScaleHasNone) {
  for (const float wrong : {0.0f, -0.0f, INFINITY, NAN, 1e-44f}) {
    EXPECT_EQ(same_divisor(wrong), std::nullopt) << wrong;
  }
}

// Without an encoding, codes of NVFP4 move to GGUF's blocks. The last matrix has half a block.
TEST(Repack, Nvfp4InRowsOfWholeBlocksStaysInGguf) {
  const TemporaryFolder folder;
  const auto ones = [](std::uint64_t count) { return std::string(count, '\x38'); };  // 1
  const std::string one("\0\0\x80\x3f", 4);
  const std::string source =
      folder.write("source.safetensors",
                   safetensors_bytes({{"blk.0.attn_q.weight", "U8", {4, 64}, some_bytes(256, 1)},
                                      {"blk.0.attn_q.weight_scale", "F8_E4M3", {4, 8}, ones(32)},
                                      {"blk.0.attn_q.weight_scale_2", "F32", {}, one},
                                      {"blk.0.attn_v.weight", "U8", {4, 16}, some_bytes(64, 2)},
                                      {"blk.0.attn_v.weight_scale", "F8_E4M3", {4, 2}, ones(8)},
                                      {"blk.0.attn_v.weight_scale_2", "F32", {}, one}}));
  ConvertOptions options;
  options.format = FileFormat::gguf;
  options.metadata = {{"general.architecture", {.value = "llama"}}};
  const auto catalog = open_checkpoint(source);
  const Conversion kept = make_conversion(catalog, options);
  ASSERT_EQ(kept.repacked.size(), 1u);
  EXPECT_EQ(kept.repacked.front().name, "blk.0.attn_q.weight");
  EXPECT_EQ(kept.repacked.front().quantization.encoding, "nvfp4-gguf");
  EXPECT_TRUE(has_errors(kept.plan.findings));  // about the other matrix
  options.dequantize = true;
  const Conversion decoded = make_conversion(catalog, options);
  EXPECT_TRUE(decoded.repacked.empty());
  EXPECT_FALSE(has_errors(decoded.plan.findings));
}

}  // namespace
}  // namespace loadstone::test
