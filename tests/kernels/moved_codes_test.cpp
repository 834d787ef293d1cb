// Tests that codes that are moved give the same bytes as their values, which are encoded again.
#include "kernels/moved_codes.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "codec/encode.h"
#include "kernels/cast.h"
#include "kernels/nibbles.h"

namespace loadstone {
namespace {

using Bytes = std::vector<std::byte>;
using Random = std::mt19937;

unsigned below(Random& random, unsigned count) {
  return std::uniform_int_distribution<unsigned>(0, count - 1)(random);
}

struct Case {
  std::string encoding;
  std::uint64_t per_scale;  // 0: a row
  Dtype scale;
  unsigned bits;
  unsigned top;  // the code with the largest magnitude
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"mxfp4", 32, Dtype::f8_e8m0, 4, 7},      {"mxfp4-gguf", 32, Dtype::f8_e8m0, 4, 7},
      {"nvfp4", 16, Dtype::f8_e4m3, 4, 7},      {"q4_0", 32, Dtype::f16, 4, 0},
      {"q8_0", 32, Dtype::f16, 8, 0x80},        {"mxfp8", 32, Dtype::f8_e8m0, 8, 0x7e},
      {"fp8", 0, Dtype::f32, 8, 0x7e},          {"fp8-channel", 0, Dtype::f32, 8, 0x7e},
      {"fp8-block", 128, Dtype::f32, 8, 0x7e},  {"int8-channel", 0, Dtype::f32, 8, 0x7f},
      {"nvfp4-gguf", 16, Dtype::f8_e4m3, 4, 7}, {"int4-packed", 128, Dtype::f32, 4, 0},
      {"int4-packed-32", 32, Dtype::f32, 4, 0},
  };
  return all;
}

QuantizedLayout layout_of(const std::string& encoding, const Shape& shape) {
  QuantizedLayout form;
  Quantization quantization;
  quantization.encoding = encoding;
  quantization.exact_first = true;
  EXPECT_FALSE(prepare_quantization(quantization, shape, Dtype::f32, form)) << encoding;
  return form;
}

float value_of(const Case& one, unsigned code) {
  constexpr std::array<float, 8> e2m1 = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  if (one.bits == 4 && one.top == 0) return static_cast<float>(code) - 8;
  if (one.bits == 4) return code < 8 ? e2m1.at(code) : -e2m1.at(code - 8);
  const auto byte = static_cast<std::byte>(code);
  float value = 0;
  const bool is_integer = one.encoding == "q8_0" || one.encoding == "int8-channel";
  cast_between(is_integer ? Dtype::i8 : Dtype::f8_e4m3, Dtype::f32)
      .run(&byte, reinterpret_cast<std::byte*>(&value), 1);
  return value;
}

// Returns a scale that the dtype represents.
float scale_of(Dtype dtype, Random& random) {
  if (dtype == Dtype::f8_e8m0) return std::ldexp(1.0F, static_cast<int>(below(random, 200)) - 110);
  const float any = std::ldexp(1 + std::uniform_real_distribution<float>()(random),
                               static_cast<int>(below(random, 8)) - 4);
  float rounded = 0;
  Bytes bytes(sizeof(float));
  cast_between(Dtype::f32, dtype).run(reinterpret_cast<const std::byte*>(&any), bytes.data(), 1);
  cast_between(dtype, Dtype::f32).run(bytes.data(), reinterpret_cast<std::byte*>(&rounded), 1);
  return rounded;
}

struct Parts {
  std::vector<Bytes> bytes;
  std::vector<std::byte*> at;

  explicit Parts(const QuantizedLayout& form) {
    for (const QuantizedPart& part : form.parts) bytes.emplace_back(part.byte_count());
    for (Bytes& each : bytes) at.push_back(each.data());
  }
};

// Codes without zeros, whose encoding depends on the encoder. Each run has the top code, which
// determines its scale.
struct Sample {
  std::uint64_t rows = 256;
  std::uint64_t columns = 384;
  std::vector<unsigned> codes;
  std::vector<float> scales;  // per run of `per_scale`
  std::vector<float> values;
  float outer = 1;

  Sample(const Case& one, std::uint64_t per_scale, Random& random) {
    const bool is_matrix = one.encoding == "fp8";
    const bool has_tiles = one.encoding == "fp8-block";
    outer = one.scale == Dtype::f8_e4m3 ? 0.37F : 1;
    for (std::uint64_t row = 0; row < rows; ++row) {
      for (std::uint64_t column = 0; column < columns; ++column) {
        if (column % per_scale == 0) {
          const bool is_new = !(is_matrix && row > 0) && !(has_tiles && row % 128 != 0);
          const std::uint64_t per_row = columns / per_scale;
          scales.push_back(is_new      ? scale_of(one.scale, random)
                           : is_matrix ? scales.front()
                                       : scales[scales.size() - per_row]);
          codes.push_back(one.top);
        } else {
          codes.push_back(code(one, random));
        }
        values.push_back(value_of(one, codes.back()) * (scales.back() * outer));
      }
    }
  }

  static unsigned code(const Case& one, Random& random) {
    for (;;) {
      const unsigned made = below(random, 1u << one.bits);
      const float value = value_of(one, made);
      if (value != 0 && value == value && value != -128) return made;
    }
  }
};

bool move(const Case& one, const QuantizedLayout& form, const Sample& sample,
          std::uint64_t per_scale, Parts& to) {
  Bytes codes;
  for (std::size_t i = 0; i < sample.codes.size(); ++i) {
    if (one.bits == 8) {
      codes.push_back(static_cast<std::byte>(sample.codes[i]));
    } else if (i % 2 == 1) {
      codes.push_back(static_cast<std::byte>(sample.codes[i - 1] | sample.codes[i] << 4));
    }
  }
  bool are_moved = true;
  for (std::uint64_t row = 0; row < sample.rows; ++row) {
    const std::uint64_t begin = row * sample.columns;
    const MovedRun run = {.begin = begin,
                          .count = sample.columns,
                          .per_scale = per_scale,
                          .codes = codes.data() + begin * one.bits / 8,
                          .scales = sample.scales.data() + row * (sample.columns / per_scale),
                          .outer = sample.outer};
    EXPECT_EQ(find_nan_code(form, run), run.count);
    const float matrix_scale = one.encoding == "fp8" ? sample.scales[0] : sample.outer;
    are_moved &= write_codes(form, 0, run, matrix_scale, to.at);
  }
  return are_moved;
}

TEST(MovedCodes, TheBytesAreThoseOfTheEncoder) {
  Random random(1);
  for (const Case& one : cases()) {
    SCOPED_TRACE(one.encoding);
    const std::uint64_t per_scale = one.per_scale == 0 ? 384 : one.per_scale;
    const Sample sample(one, per_scale, random);
    const QuantizedLayout form = layout_of(one.encoding, {sample.rows, sample.columns});
    ASSERT_TRUE(holds_moved_codes(form));
    Parts expected(form);
    Parts found(form);
    const std::array<float, 1> amax = {1};
    const std::array<float, 1> scale = {one.encoding == "fp8" ? sample.scales[0] : sample.outer};
    (void)quantize_window(form, 0, form.elements,
                          reinterpret_cast<const std::byte*>(sample.values.data()), expected.at,
                          amax, nullptr, scale);
    EXPECT_TRUE(move(one, form, sample, per_scale, found));
    EXPECT_EQ(found.bytes, expected.bytes);
  }
}

TEST(MovedCodes, BlocksWhoseScaleDoesNotFitStayUnchanged) {
  Random random(2);
  for (const Case& one : cases()) {
    SCOPED_TRACE(one.encoding);
    const std::uint64_t per_scale = one.per_scale == 0 ? 384 : one.per_scale;
    Sample sample(one, per_scale, random);
    const QuantizedLayout form = layout_of(one.encoding, {sample.rows, sample.columns});
    Parts whole(form);
    ASSERT_TRUE(move(one, form, sample, per_scale, whole));
    for (const float wrong : {0.0F, std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN(), 0x1p126F}) {
      Parts found(form);
      sample.scales.back() = wrong;
      EXPECT_FALSE(move(one, form, sample, per_scale, found)) << wrong;
      EXPECT_EQ(found.bytes[0].front(), whole.bytes[0].front());
      // Other rows of the block wrote the scale of fp8-block.
      if (one.encoding != "fp8-block") {
        EXPECT_EQ(found.bytes.back().back(), std::byte{0});
      }
    }
  }
}

TEST(MovedCodes, GgufsOrderIsReversed) {
  Random random(3);
  std::array<std::byte, 16> codes;
  std::array<std::byte, 16> blocks;
  std::array<std::byte, 16> back;
  for (int repeat = 0; repeat < 100; ++repeat) {
    for (std::byte& each : codes) each = static_cast<std::byte>(below(random, 256));
    nibbles::to_gguf(codes.data(), blocks.data());
    const auto code = [](const auto& bytes, std::size_t i) {
      return std::to_integer<unsigned>(bytes[i / 2]) >> (i % 2 * 4) & 15u;
    };
    for (std::size_t i = 0; i < 16; ++i) {
      const auto byte = std::to_integer<unsigned>(blocks[i]);
      EXPECT_EQ(byte & 15u, code(codes, i));
      EXPECT_EQ(byte >> 4, code(codes, i + 16));
    }
    nibbles::from_gguf(blocks.data(), back.data());
    EXPECT_EQ(back, codes);
  }
}

}  // namespace
}  // namespace loadstone
