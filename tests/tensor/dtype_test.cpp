#include "loadstone/dtype.h"

#include <gtest/gtest.h>

#include "loadstone/shape.h"

namespace loadstone {

namespace {

constexpr int block_format_count = static_cast<int>(BlockFormat::q2_0) + 1;

TEST(DtypeNames, RoundTripExactlyAndInAnyCase) {
  for (std::size_t i = 0; i < dtype_count; ++i) {
    const auto dtype = static_cast<Dtype>(i);
    EXPECT_EQ(parse_dtype_name(name(dtype)), dtype);
    std::string lower(name(dtype));
    for (char& each : lower) each = static_cast<char>(std::tolower(each));
    EXPECT_FALSE(parse_dtype_name(lower)) << lower;
    EXPECT_EQ(parse_dtype(lower), dtype);
    EXPECT_EQ(parse_encoding(lower), Encoding(dtype));
  }
  EXPECT_FALSE(parse_dtype_name(""));
  EXPECT_FALSE(parse_dtype_name("F128"));
}

TEST(DtypeNames, TorchsNamesAreKnown) {
  EXPECT_EQ(parse_dtype("torch.bfloat16"), Dtype::bf16);
  EXPECT_EQ(parse_dtype("float8_e4m3fn"), Dtype::f8_e4m3);
  EXPECT_EQ(parse_dtype("float8_e8m0fnu"), Dtype::f8_e8m0);
  EXPECT_EQ(parse_dtype("half"), Dtype::f16);
  EXPECT_EQ(parse_dtype("Long"), Dtype::i64);
  EXPECT_EQ(parse_dtype("bool"), Dtype::boolean);
  EXPECT_EQ(parse_dtype("complex64"), Dtype::c64);
  EXPECT_FALSE(parse_dtype("float9"));
  EXPECT_FALSE(parse_dtype(""));
}

TEST(Encodings, BlockFormatsRoundTrip) {
  for (int i = 0; i < block_format_count; ++i) {
    const Encoding encoding = static_cast<BlockFormat>(i);
    EXPECT_EQ(parse_encoding(encoding.name()), encoding);
    EXPECT_FALSE(encoding.is_dtype());
  }
  EXPECT_EQ(parse_encoding("q4_k"), Encoding(BlockFormat::q4_k));
  EXPECT_FALSE(parse_encoding("q9_k"));
  EXPECT_NE(Encoding(static_cast<Dtype>(1)), Encoding(static_cast<BlockFormat>(1)));
}

TEST(Encodings, CountBytes) {
  EXPECT_EQ(Encoding(Dtype::f32).byte_count(3), 12u);
  EXPECT_EQ(Encoding(Dtype::c64).byte_count(3), 24u);
  EXPECT_EQ(Encoding(Dtype::f4).byte_count(6), 3u);
  EXPECT_FALSE(Encoding(Dtype::f4).byte_count(5));
  EXPECT_EQ(Encoding(Dtype::f6_e2m3).byte_count(8), 6u);
  EXPECT_FALSE(Encoding(Dtype::f6_e3m2).byte_count(6));
  EXPECT_EQ(Encoding(BlockFormat::q4_k).byte_count(512), 288u);
  EXPECT_FALSE(Encoding(BlockFormat::q4_k).byte_count(128));
  EXPECT_EQ(Encoding(BlockFormat::q8_1).byte_count(32), 36u);
  EXPECT_EQ(Encoding(BlockFormat::q8_k).byte_count(256), 292u);
  EXPECT_EQ(Encoding(Dtype::u8).byte_count(UINT64_MAX), UINT64_MAX);
  EXPECT_FALSE(Encoding(Dtype::u16).byte_count(std::uint64_t{1} << 63));
  EXPECT_EQ(Encoding(Dtype::f4).byte_count(UINT64_MAX - 1), UINT64_MAX / 2);
}

TEST(Shapes, CountElements) {
  EXPECT_EQ(Shape().numel(), 1u);
  EXPECT_EQ((Shape{2, 3, 4}).numel(), 24u);
  EXPECT_EQ((Shape{2, 0, 4}).numel(), 0u);
  const std::uint64_t large = std::uint64_t{1} << 32;
  EXPECT_FALSE((Shape{large, large}).numel());
  EXPECT_FALSE((Shape{large, large, 0}).numel());
  EXPECT_FALSE((Shape{0, large, large}).numel());
  EXPECT_EQ((Shape{0, large}).numel(), 0u);
  EXPECT_EQ(Shape(std::vector<std::uint64_t>(300, 1)).numel(), 1u);
}

TEST(Shapes, AreShownAsTorchDoes) {
  EXPECT_EQ(Shape().text(), "[]");
  EXPECT_EQ((Shape{7}).text(), "[7]");
  EXPECT_EQ((Shape{2, 3}).text(), "[2, 3]");
}

}  // namespace

}  // namespace loadstone
