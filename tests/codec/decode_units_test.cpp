// Tests decoding of weights that have more components than one scale, and of weights whose blocks
// are cut off at the tensor's edges.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <random>
#include <vector>

#include "codec/decode.h"
#include "kernels/bnb.h"
#include "kernels/cast.h"
#include "kernels/number.h"

namespace loadstone::test {
namespace {

using Bytes = std::vector<std::byte>;

Bytes bytes_of(const std::vector<float>& values) {
  Bytes bytes(values.size() * sizeof(float));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// Returns random codes whose values are finite.
Bytes random_codes(std::uint64_t count, unsigned seed, unsigned highest = 0x7e) {
  std::mt19937 random(seed);
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() % (highest + 1));
  return bytes;
}

std::vector<float> random_floats(std::uint64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> some(0.1f, 3.0f);
  std::vector<float> values(count);
  for (float& value : values) value = some(random);
  return values;
}

struct Input {
  Encoding encoding = Dtype::u8;
  Shape shape;
  Bytes bytes;
};

PreparedDecoder form_of(const char* kernel, const std::vector<Input>& inputs, const Shape& shape,
                        float offset = 0) {
  std::vector<DecodePart> parts;
  for (const Input& input : inputs) parts.push_back({input.encoding, input.shape});
  PreparedDecoder form;
  const auto problem = prepare_decoding(kernel, parts, shape, Dtype::f32, offset, form);
  EXPECT_FALSE(problem.has_value()) << kernel << ": " << problem->message;
  return form;
}

// Decodes from exact copies of the requested bytes, so a sanitizer detects reads outside them.
std::vector<float> decoded(const PreparedDecoder& form, const std::vector<Input>& inputs,
                           std::uint64_t begin, std::uint64_t end) {
  std::vector<Bytes> copies;
  std::vector<const std::byte*> parts;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const auto range = form.part_bytes(i, begin, end);
    EXPECT_LE(range.end, inputs[i].bytes.size());
    copies.emplace_back(inputs[i].bytes.begin() + static_cast<std::ptrdiff_t>(range.begin),
                        inputs[i].bytes.begin() + static_cast<std::ptrdiff_t>(range.end));
    parts.push_back(copies.back().data());
  }
  std::vector<float> values(end - begin);
  decode(form, begin, end, parts, reinterpret_cast<std::byte*>(values.data()));
  return values;
}

void expect_all_ranges(const PreparedDecoder& form, const std::vector<Input>& inputs,
                       const std::vector<float>& expected) {
  ASSERT_EQ(expected.size(), form.elements);
  EXPECT_EQ(decoded(form, inputs, 0, form.elements), expected);
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    const std::uint64_t begin = random() % form.elements;
    const std::uint64_t end = begin + 1 + random() % (form.elements - begin);
    const std::vector<float> part(expected.begin() + static_cast<std::ptrdiff_t>(begin),
                                  expected.begin() + static_cast<std::ptrdiff_t>(end));
    ASSERT_EQ(decoded(form, inputs, begin, end), part) << begin << " " << end;
  }
}

float e4m3(std::byte code) { return number::load<Dtype::f8_e4m3>(&code); }

TEST(DecodeUnits, Nvfp4HasTwoScalesAndOneOfThemForAMatrix) {
  constexpr std::array<float, 8> values = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (const bool divided : {false, true}) {
    for (const std::uint64_t globals : {1u, 3u}) {
      const Shape shape = {3, 5, 40};  // 2.5 blocks
      const std::vector<Input> inputs = {
          {Dtype::u8, {3, 5, 20}, random_codes(300, 1, 255)},
          {Dtype::f8_e4m3, {3, 5, 3}, random_codes(45, 2)},
          {Dtype::f32, {globals}, bytes_of(random_floats(globals, 3))}};
      const PreparedDecoder form = form_of(divided ? "nvfp4_divided" : "nvfp4", inputs, shape);
      std::vector<float> expected;
      for (std::uint64_t i = 0; i < 600; ++i) {
        const auto byte = std::to_integer<unsigned>(inputs[0].bytes[i / 2]);
        const unsigned code = i % 2 == 0 ? byte & 15u : byte >> 4;
        const float value = code < 8 ? values[code] : -values[code - 8];
        const float scale = e4m3(inputs[1].bytes[i / 40 * 3 + i % 40 / 16]);
        float global = 0;
        std::memcpy(&global, inputs[2].bytes.data() + (globals == 1 ? 0 : i / 200 * 4), 4);
        expected.push_back(value * (divided ? scale / global : scale * global));
      }
      expect_all_ranges(form, inputs, expected);
    }
  }
}

TEST(DecodeUnits, BlocksOf128MayBeCutAtTheEdges) {
  const std::vector<Input> inputs = {{Dtype::f8_e4m3, {192, 130}, random_codes(192 * 130, 1)},
                                     {Dtype::f32, {2, 2}, bytes_of(random_floats(4, 2))}};
  const PreparedDecoder form = form_of("fp8_block_128", inputs, {192, 130});
  std::vector<float> scales(4);
  std::memcpy(scales.data(), inputs[1].bytes.data(), 16);
  std::vector<float> expected;
  for (std::uint64_t i = 0; i < 192 * 130; ++i) {
    expected.push_back(e4m3(inputs[0].bytes[i]) * scales[i / 130 / 128 * 2 + i % 130 / 128]);
  }
  expect_all_ranges(form, inputs, expected);
}

TEST(DecodeUnits, AVectorOfScalesIsOneARow) {
  for (const Shape& scales_shape : {Shape{2, 6}, Shape{2, 6, 1}}) {
    for (const Dtype dtype : {Dtype::f8_e4m3, Dtype::i8}) {
      const std::vector<Input> inputs = {
          {dtype, {2, 6, 6}, random_codes(72, 1)},
          {Dtype::f32, scales_shape, bytes_of(random_floats(12, 2))}};
      const PreparedDecoder form =
          form_of(dtype == Dtype::i8 ? "int8_rows" : "fp8_rows", inputs, {2, 6, 6});
      std::vector<float> scales(12);
      std::memcpy(scales.data(), inputs[1].bytes.data(), 48);
      std::vector<float> expected;
      for (std::uint64_t i = 0; i < 72; ++i) {
        const std::byte code = inputs[0].bytes[i];
        const float value = dtype == Dtype::i8
                                ? static_cast<float>(std::to_integer<std::int8_t>(code))
                                : e4m3(code);
        expected.push_back(value * scales[i / 6]);
      }
      expect_all_ranges(form, inputs, expected);
    }
  }
}

TEST(DecodeUnits, BitsandbytesIsWhatItsKernelsGive) {
  const std::uint64_t elements = 70 * 1000 + 3;
  const std::uint64_t blocks = elements / 64 + 1;
  const std::uint64_t groups = blocks / 256 + 1;
  const Bnb4 bnb = {.code = Bnb4Code::nf4, .block_size = 64};
  const Bytes data = random_codes(elements / 2 + 1, 1, 255);
  const auto map = std::as_bytes(bnb_dynamic_map());
  for (const bool nested : {false, true}) {
    Bytes absmax = bytes_of(random_floats(blocks, 2));
    std::vector<Input> inputs = {{Dtype::u8, {data.size(), 1}, data},
                                 {Dtype::f32, {blocks}, absmax}};
    if (nested) {
      inputs[1] = {Dtype::u8, {blocks}, random_codes(blocks, 4, 255)};
      inputs.push_back({Dtype::f32, {groups}, bytes_of(random_floats(groups, 3))});
      inputs.push_back({Dtype::f32, {256}, {map.begin(), map.end()}});
      decode_bnb_nested(0, blocks, inputs[1].bytes.data(), inputs[2].bytes.data(), map.data(),
                        0.25f, absmax.data());
    }
    std::vector<float> expected(elements);
    decode_bnb4(bnb, 0, elements, data.data(), absmax.data(), Dtype::f32,
                reinterpret_cast<std::byte*>(expected.data()));
    const PreparedDecoder form = form_of("bnb_nf4", inputs, {elements}, nested ? 0.25f : 0.0f);
    // Each scale covers a block of 64 values.
    EXPECT_EQ(form.part_bytes(1, 0, 64).size(), nested ? 1u : 4u);
    EXPECT_EQ(form.part_bytes(1, 0, 65).size(), nested ? 2u : 8u);
    expect_all_ranges(form, inputs, expected);
  }
}

TEST(DecodeUnits, Int8OfBitsandbytesGoesByRows) {
  const std::vector<Input> inputs = {{Dtype::i8, {7, 30}, random_codes(210, 1, 255)},
                                     {Dtype::f32, {7}, bytes_of(random_floats(7, 2))}};
  std::vector<float> expected(210);
  decode_bnb_int8(0, 210, 30, inputs[0].bytes.data(), inputs[1].bytes.data(), Dtype::f32,
                  reinterpret_cast<std::byte*>(expected.data()));
  expect_all_ranges(form_of("bnb_int8", inputs, {7, 30}), inputs, expected);
}

TEST(DecodeUnits, WhatDoesNotFitIsSaid) {
  PreparedDecoder form;
  const auto fits = [&](const char* kernel, std::vector<DecodePart> parts, const Shape& shape,
                        float offset = 0) {
    return !prepare_decoding(kernel, parts, shape, Dtype::bf16, offset, form);
  };
  const DecodePart data = {Dtype::u8, {4, 16}};
  const DecodePart scales = {Dtype::f8_e4m3, {4, 2}};
  const DecodePart global = {Dtype::f32, {}};
  EXPECT_TRUE(fits("nvfp4", {data, scales, global}, {4, 32}));
  EXPECT_FALSE(fits("nvfp4", {data, scales}, {4, 32}));
  EXPECT_FALSE(fits("nvfp4", {data, scales, global}, {4, 16}));
  EXPECT_FALSE(fits("nvfp4", {data, scales, global}, {4, 32}, 1));
  EXPECT_FALSE(fits("nvfp4", {data, {Dtype::f8_e4m3, {4, 3}}, global}, {4, 32}));
  EXPECT_FALSE(fits("nvfp4", {data, scales, {Dtype::f32, {2}}}, {4, 32}));
  EXPECT_FALSE(fits("nvfp4", {data, scales, {Dtype::bf16, {}}}, {4, 32}));
  const DecodePart weights = {Dtype::f8_e4m3, {200, 300}};
  EXPECT_TRUE(fits("fp8_block_128", {weights, {Dtype::f32, {2, 3}}}, {200, 300}));
  EXPECT_FALSE(fits("fp8_block_128", {weights, {Dtype::f32, {2, 2}}}, {200, 300}));
  EXPECT_FALSE(fits("fp8_block_128", {weights, {Dtype::f32, {}}}, {200, 300}));
  EXPECT_TRUE(fits("fp8_rows", {weights, {Dtype::f32, {200}}}, {200, 300}));
  EXPECT_FALSE(fits("fp8_rows", {weights, {Dtype::f32, {300}}}, {200, 300}));
  EXPECT_FALSE(fits("int8_rows", {weights, {Dtype::f32, {200}}}, {200, 300}));
  const DecodePart packed = {Dtype::u8, {64, 1}};
  EXPECT_TRUE(fits("bnb_nf4", {packed, {Dtype::f32, {2}}}, {128}));
  EXPECT_FALSE(fits("bnb_nf4", {packed, {Dtype::f32, {3}}}, {128}));
  EXPECT_FALSE(fits("bnb_nf4", {packed, {Dtype::f32, {2}}}, {128}, 1));
  EXPECT_FALSE(fits("bnb_nf4", {packed, {Dtype::f32, {2}}}, {130}));
  EXPECT_FALSE(fits("bnb_nf4", {packed, {Dtype::u8, {2}}, {Dtype::f32, {1}}}, {128}));
}

}  // namespace
}  // namespace loadstone::test
