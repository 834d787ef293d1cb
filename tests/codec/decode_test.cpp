// Compares decoders with a plain loop that follows the definition of each encoding.
// python/tests/convert/test_decode.py compares that definition with transformers.
#include "codec/decode.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "codec/fp4/blocks.h"
#include "kernels/cast.h"
#include "kernels/number.h"

namespace loadstone::test {
namespace {

using Bytes = std::vector<std::byte>;

Bytes random_bytes(std::uint64_t count, unsigned seed) {
  std::mt19937 random(seed);
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

float as_f32(Dtype dtype, const std::byte* from, std::uint64_t index) {
  float value = 0;
  cast_between(dtype, Dtype::f32)
      .run(from + index * element_bytes(dtype), reinterpret_cast<std::byte*>(&value), 1);
  return value;
}

struct Case {
  const char* kernel;
  Dtype weight;
  Shape weights;
  Dtype scale;
  Shape scales;
  Shape shape;
};

std::vector<Case> cases() {
  return {
      {"fp8_block", Dtype::f8_e4m3, {6, 10}, Dtype::f32, {3, 2}, {6, 10}},
      {"fp8_block", Dtype::f8_e5m2, {4, 3000}, Dtype::bf16, {2, 3}, {4, 3000}},
      {"fp8_block", Dtype::f8_e4m3, {3, 4, 6}, Dtype::f16, {3, 2, 3}, {3, 4, 6}},
      {"fp8_block", Dtype::f8_e4m3, {3, 4, 6}, Dtype::f8_e8m0, {2, 3}, {3, 4, 6}},
      {"fp8_block", Dtype::f8_e4m3, {5, 7}, Dtype::f32, {}, {5, 7}},
      {"fp8_block", Dtype::f8_e4m3, {2, 5, 7}, Dtype::f32, {2}, {2, 5, 7}},
      {"fp4_block", Dtype::i8, {6, 5}, Dtype::u8, {2, 5}, {6, 10}},
      {"fp4_block", Dtype::u8, {6, 5}, Dtype::f32, {6, 10}, {6, 10}},
      {"mxfp4", Dtype::u8, {2, 3, 2, 16}, Dtype::u8, {2, 3, 2}, {2, 3, 64}},
      {"mxfp4", Dtype::u8, {3, 16}, Dtype::u8, {3}, {96}},
  };
}

struct Made {
  Bytes weights;
  Bytes scales;
  PreparedDecoder form;
};

Made made_of(const Case& c, Dtype dtype, unsigned seed) {
  Made made;
  made.weights = random_bytes(*Encoding(c.weight).byte_count(*c.weights.numel()), seed);
  made.scales = random_bytes(*Encoding(c.scale).byte_count(*c.scales.numel()), seed + 1);
  const std::array parts = {DecodePart{c.weight, c.weights}, DecodePart{c.scale, c.scales}};
  const auto problem = prepare_decoding(c.kernel, parts, c.shape, dtype, 0, made.form);
  EXPECT_FALSE(problem.has_value()) << c.kernel << ": " << problem->message;
  return made;
}

// Returns the value of one element by the definition of the encoding.
float element_of(const Case& c, const Made& made, std::uint64_t index) {
  float value = 0;
  if (c.weight == Dtype::f8_e4m3 || c.weight == Dtype::f8_e5m2) {
    value = as_f32(c.weight, made.weights.data(), index);
  } else {
    const auto byte = std::to_integer<unsigned>(made.weights[index / 2]);
    const unsigned nibble = index % 2 == 0 ? byte % 16 : byte / 16;
    constexpr std::array<float, 8> magnitudes = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    value = nibble < 8 ? magnitudes[nibble] : -magnitudes[nibble - 8];
  }
  const bool is_mxfp4 = std::string_view(c.kernel) == "mxfp4";
  const std::size_t rank = c.shape.rank();
  const std::uint64_t columns = c.shape[rank - 1];
  const std::uint64_t rows = rank < 2 ? 1 : c.shape[rank - 2];
  const std::uint64_t column = index % columns;
  const std::uint64_t row = index / columns % rows;
  const std::uint64_t matrix = index / columns / rows;
  std::uint64_t scale = index / 32;
  if (!is_mxfp4) {
    const std::size_t scale_rank = c.scales.rank();
    const std::uint64_t scale_rows = scale_rank < 2 ? 1 : c.scales[scale_rank - 2];
    const std::uint64_t scale_columns = scale_rank < 2 ? 1 : c.scales[scale_rank - 1];
    const bool shared = *c.scales.numel() == scale_rows * scale_columns;
    scale = (shared ? 0 : matrix * scale_rows * scale_columns) +
            row / (rows / scale_rows) * scale_columns + column / (columns / scale_columns);
  }
  if (c.scale != Dtype::u8) return value * as_f32(c.scale, made.scales.data(), scale);
  const int exponent = std::to_integer<int>(made.scales[scale]) - 127;
  return is_mxfp4 ? std::ldexp(value, exponent) : value * std::ldexp(1.0f, exponent);
}

// Compares two values and treats all NaNs as equal. The Python tests compare NaN payloads with
// torch.
bool same(Dtype dtype, const std::byte* a, const std::byte* b) {
  const float left = as_f32(dtype, a, 0);
  const float right = as_f32(dtype, b, 0);
  if (std::isnan(left) || std::isnan(right)) return std::isnan(left) && std::isnan(right);
  return std::memcmp(a, b, element_bytes(dtype)) == 0;
}

TEST(Decode, IsTheDefinitionElementByElement) {
  for (const Case& c : cases()) {
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
      for (unsigned seed = 0; seed < 4; ++seed) {
        const Made made = made_of(c, dtype, seed);
        const std::size_t size = element_bytes(dtype);
        Bytes found(made.form.elements * size);
        const std::array parts = {std::as_const(made.weights).data(),
                                  std::as_const(made.scales).data()};
        decode(made.form, 0, made.form.elements, parts, found.data());
        for (std::uint64_t i = 0; i < made.form.elements; ++i) {
          const float value = element_of(c, made, i);
          Bytes expected(size);
          cast_between(Dtype::f32, dtype)
              .run(reinterpret_cast<const std::byte*>(&value), expected.data(), 1);
          ASSERT_TRUE(same(dtype, found.data() + i * size, expected.data()))
              << c.kernel << " " << c.shape.text() << " element " << i;
        }
      }
    }
  }
}

// Decodes each part from just the bytes that the decoder requests.
TEST(Decode, PartsAreThoseOfTheWhole) {
  std::mt19937 random(3);
  for (const Case& c : cases()) {
    const Made made = made_of(c, Dtype::bf16, 9);
    const PreparedDecoder& form = made.form;
    Bytes whole(form.elements * 2);
    const std::array parts = {made.weights.data(), made.scales.data()};
    decode(form, 0, form.elements, parts, whole.data());
    EXPECT_EQ(form.part_bytes(0, 0, form.elements).size(), made.weights.size());
    EXPECT_EQ(form.part_bytes(1, 0, form.elements).size(), made.scales.size());
    for (int round = 0; round < 300; ++round) {
      const std::uint64_t begin = random() % form.elements;
      const std::uint64_t end = begin + 1 + random() % (form.elements - begin);
      const auto weights = form.part_bytes(0, begin, end);
      const auto scales = form.part_bytes(1, begin, end);
      ASSERT_LE(weights.end, made.weights.size());
      ASSERT_LE(scales.end, made.scales.size());
      // The decoder gets exact copies of the requested bytes, so a sanitizer detects reads outside
      // them.
      const Bytes some_weights(made.weights.begin() + static_cast<std::ptrdiff_t>(weights.begin),
                               made.weights.begin() + static_cast<std::ptrdiff_t>(weights.end));
      const Bytes some_scales(made.scales.begin() + static_cast<std::ptrdiff_t>(scales.begin),
                              made.scales.begin() + static_cast<std::ptrdiff_t>(scales.end));
      Bytes part((end - begin) * 2);
      const std::array some_parts = {some_weights.data(), some_scales.data()};
      decode(form, begin, end, some_parts, part.data());
      ASSERT_EQ(std::memcmp(part.data(), whole.data() + begin * 2, part.size()), 0)
          << c.kernel << " " << c.shape.text() << " [" << begin << ", " << end << ")";
    }
  }
}

TEST(Decode, WhatDoesNotFitIsSaid) {
  PreparedDecoder form;
  const auto message = [&](const char* kernel, std::vector<DecodePart> parts, const Shape& shape,
                           Dtype dtype = Dtype::f32) {
    const auto problem = prepare_decoding(kernel, parts, shape, dtype, 0, form);
    return problem ? problem->message : "";
  };
  const DecodePart weights = {Dtype::f8_e4m3, {4, 6}};
  const DecodePart scales = {Dtype::f32, {2, 3}};
  EXPECT_EQ(message("fp8_block", {weights, scales}, {4, 6}), "");
  EXPECT_NE(message("fp8", {weights, scales}, {4, 6}), "");
  EXPECT_NE(message("fp8_block", {weights}, {4, 6}), "");
  EXPECT_NE(message("fp8_block", {weights, scales, scales}, {4, 6}), "");
  EXPECT_NE(message("fp8_block", {}, {4, 6}), "");
  EXPECT_NE(message("fp8_block", {weights, scales}, {6, 4}), "");
  EXPECT_NE(message("fp8_block", {weights, scales}, {4, 6}, Dtype::f8_e4m3), "");
  EXPECT_NE(message("fp8_block", {weights, {BlockFormat::q4_k, {2, 3}}}, {4, 6}), "");
  EXPECT_NE(message("fp8_block", {weights, {Dtype::f32, {3, 3}}}, {4, 6}), "");
  EXPECT_NE(message("fp8_block", {weights, {Dtype::f32, {0, 3}}}, {4, 6}), "");
  EXPECT_NE(message("fp8_block", {weights, {Dtype::f32, {5}}}, {4, 6}), "");
  EXPECT_NE(message("fp8_block", {{Dtype::f8_e4m3, {0, 6}}, {Dtype::f32, {0, 3}}}, {0, 6}), "");
  EXPECT_NE(message("fp4_block", {{Dtype::i8, {1, UINT64_MAX}}, {Dtype::f32, {1}}}, {1}), "");
  EXPECT_NE(message("mxfp4", {{Dtype::u8, {16}}, {Dtype::u8, {}}}, {32}), "");
  EXPECT_NE(message("mxfp4", {{Dtype::u8, {2, 16}}, {Dtype::u8, {3}}}, {64}), "");
}

// Blocks of 32 rows and blocks of 32 columns may have the same number of scales.
TEST(Mxfp4Blocks, AreMadeOfRowsOnly) {
  const auto is_made = [](const Shape& scales) {
    const std::vector<TensorInfo> tensors = {
        {.name = "w", .encoding = Dtype::i8, .shape = {64, 32}},
        {.name = "w_scale", .encoding = Dtype::f8_e8m0, .shape = scales}};
    return mxfp4_blocks_of({"fp4_block", {0, 1}, {64, 64}, Dtype::f32}, tensors).has_value();
  };
  EXPECT_TRUE(is_made({64, 2}));
  EXPECT_FALSE(is_made({2, 64}));
  EXPECT_FALSE(is_made({2, 2}));
}

}  // namespace
}  // namespace loadstone::test
