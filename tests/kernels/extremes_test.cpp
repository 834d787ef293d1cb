// Tests every encoding with its largest and smallest inputs, and with an empty tensor. Scales must
// be finite and positive, and decoded values must be finite.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "codec/decode.h"
#include "codec/encode.h"
#include "kernels/cast.h"
#include "kernels/quantize.h"

namespace loadstone::test {
namespace {

constexpr std::uint32_t rows = 130;
constexpr std::uint32_t columns = 256;
constexpr std::uint32_t count = rows * columns;

using Bytes = std::vector<std::byte>;

Bytes cast(Dtype from, Dtype to, const Bytes& bytes) {
  const std::size_t elements = bytes.size() / element_bytes(from);
  Bytes made(elements * element_bytes(to));
  cast_between(from, to).run(bytes.data(), made.data(), elements);
  return made;
}

std::vector<float> floats(Dtype dtype, const Bytes& bytes) {
  const Bytes wide = cast(dtype, Dtype::f32, bytes);
  std::vector<float> values(wide.size() / sizeof(float));
  std::memcpy(values.data(), wide.data(), wide.size());
  return values;
}

// Returns values with these bits. Every third value is negative.
Bytes of_bits(Dtype dtype, const std::vector<std::uint32_t>& bits) {
  const std::size_t size = element_bytes(dtype);
  Bytes bytes(bits.size() * size);
  for (std::size_t i = 0; i < bits.size(); ++i) {
    const std::uint32_t sign = i % 3 == 1 ? (size == 4 ? 0x80000000u : 0x8000u) : 0;
    const std::uint32_t value = bits[i] | sign;
    std::memcpy(bytes.data() + i * size, &value, size);
  }
  return bytes;
}

std::uint32_t largest_bits(Dtype dtype) {
  return dtype == Dtype::f32 ? 0x7f7fffffu : dtype == Dtype::bf16 ? 0x7f7fu : 0x7bffu;
}

struct Pattern {
  std::string name;
  std::vector<std::uint32_t> bits;
};

std::vector<Pattern> patterns(Dtype dtype) {
  const std::uint32_t most = largest_bits(dtype);
  const std::uint32_t one_exponent = dtype == Dtype::f32    ? 1u << 23
                                     : dtype == Dtype::bf16 ? 1u << 7
                                                            : 1u << 10;
  std::vector<Pattern> all;
  const auto add = [&](const char* name, auto bits_at) {
    Pattern& pattern = all.emplace_back();
    pattern.name = name;
    for (std::uint32_t i = 0; i < count; ++i) pattern.bits.push_back(bits_at(i));
  };
  std::mt19937 random(7);
  add("zeros", [](std::uint32_t) { return 0u; });
  add("largest", [&](std::uint32_t) { return most; });
  add("largest among zeros", [&](std::uint32_t i) { return i % 97 == 0 ? most : 0u; });
  add("near the largest", [&](std::uint32_t i) { return most - i % (one_exponent / 2); });
  add("rows of one magnitude near the largest", [&](std::uint32_t i) {
    return most - i / columns * (one_exponent / 128) - (i / columns) % 2;
  });
  add("blocks of one magnitude near the largest", [&](std::uint32_t i) {
    return most - i / 16 * std::max(one_exponent / 1024, 1u) % (2 * one_exponent);
  });
  add("smallest", [](std::uint32_t) { return 1u; });
  add("subnormal", [&](std::uint32_t i) { return i % one_exponent; });
  add("smallest normal", [&](std::uint32_t i) { return one_exponent + i % 7; });
  add("a row of each exponent",
      [&](std::uint32_t i) { return std::min(i / columns * (most / rows) + i % 5, most); });
  add("any bits", [&](std::uint32_t) { return static_cast<std::uint32_t>(random()) % (most + 1); });
  return all;
}

struct Form {  // encoding and dialect
  const char* name;
  const char* dialect;
  bool nested = false;
};

constexpr Form encodings[] = {{"fp8", "exact"},
                              {"fp8", "modelopt-compat"},
                              {"fp8", "modelopt-export"},
                              {"fp8-channel", "exact"},
                              {"fp8-channel", "modelopt-compat"},
                              {"fp8-block", "exact"},
                              {"fp8-block", "modelopt-compat"},
                              {"int8-channel", "exact"},
                              {"int8-channel", "modelopt-compat"},
                              {"int4", "exact"},
                              {"int4", "modelopt-compat"},
                              {"int4-awq", "exact"},
                              {"int4-packed-32", "compressed-tensors"},
                              {"nvfp4", "exact"},
                              {"nvfp4", "modelopt-compat"},
                              {"mxfp4", "exact"},
                              {"mxfp4", "modelopt-compat"},
                              {"mxfp8", "exact"},
                              {"mxfp8", "modelopt-compat"},
                              {"nf4", "bnb-cpu"},
                              {"nf4", "bnb-cuda"},
                              {"fp4", "bnb-cpu"},
                              {"fp4", "bnb-cuda"},
                              {"nf4", "bnb-cpu", true},
                              {"nf4", "bnb-cuda", true},
                              {"int8", "bnb-cpu"},
                              {"int8", "bnb-cuda"}};

struct Encoded {
  QuantizedLayout form;
  std::vector<Bytes> parts;
  std::uint64_t good = 0;  // values before the first rejected one

  [[nodiscard]] std::vector<const std::byte*> pointers() const {
    std::vector<const std::byte*> all;
    for (const Bytes& part : parts) all.push_back(part.data());
    return all;
  }
};

Encoded encode(const Form& encoding, Dtype dtype, const Bytes& numbers) {
  Quantization quantization;
  quantization.encoding = encoding.name;
  quantization.dialect = encoding.dialect;
  quantization.nested = encoding.nested;
  Encoded encoded;
  QuantizedLayout& form = encoded.form;
  const auto problem = prepare_quantization(quantization, {rows, columns}, dtype, form);
  EXPECT_FALSE(problem) << problem->message;
  std::vector<std::byte*> pointers;
  for (const QuantizedPart& part : form.parts) encoded.parts.emplace_back(part.byte_count());
  for (Bytes& part : encoded.parts) pointers.push_back(part.data());
  std::vector<float> amax(form.needs_amax ? form.stack : 0);
  if (form.needs_amax) (void)measure_window(form, 0, count, numbers.data(), amax);
  Bytes scratch(form.scratch_bytes);
  encoded.good = quantize_window(form, 0, count, numbers.data(), pointers, amax, scratch.data());
  finish_quantized(form, pointers, amax, scratch.data());
  return encoded;
}

std::vector<float> scales_of(const QuantizedPart& part, const Bytes& bytes) {
  return floats(part.dtype == Dtype::u8 ? Dtype::f8_e8m0 : part.dtype, bytes);
}

void decode(const Form& encoding, const Encoded& encoded, Dtype dtype, Bytes& numbers) {
  if (!std::string_view(encoding.dialect).starts_with("bnb")) {
    dequantize_window(encoded.form, 0, count, encoded.pointers(), dtype, numbers.data());
    return;
  }
  const std::string_view name = encoding.name;
  const char* const kernel = name == "nf4" ? "bnb_nf4" : name == "fp4" ? "bnb_fp4" : "bnb_int8";
  std::vector<DecodePart> parts = {{encoded.form.parts[0].dtype, encoded.form.parts[0].shape},
                                   {encoded.form.parts[1].dtype, encoded.form.parts[1].shape}};
  auto pointers = encoded.pointers();
  float offset = 0;
  if (encoding.nested) {
    parts.push_back({encoded.form.parts[2].dtype, encoded.form.parts[2].shape});
    parts.push_back({Dtype::f32, {256}});
    std::memcpy(&offset, pointers[3], sizeof(offset));
    pointers[3] = reinterpret_cast<const std::byte*>(bnb_dynamic_map().data());
  }
  PreparedDecoder form;
  const auto problem = prepare_decoding(kernel, parts, {rows, columns}, dtype, offset, form);
  ASSERT_FALSE(problem) << problem->message;
  loadstone::decode(form, 0, count, pointers, numbers.data());
}

class Extremes : public ::testing::TestWithParam<Form> {};

TEST_P(Extremes, ScalesAreFiniteAndAboveZeroAndNumbersStayFinite) {
  const Form& encoding = GetParam();
  const bool is_bnb = std::string_view(encoding.dialect).starts_with("bnb");
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    for (const Pattern& pattern : patterns(dtype)) {
      SCOPED_TRACE(fmt::format("{} {}", name(dtype), pattern.name));
      const Bytes numbers = of_bits(dtype, pattern.bits);
      for (const float value : floats(dtype, numbers)) ASSERT_TRUE(std::isfinite(value));
      const Encoded encoded = encode(encoding, dtype, numbers);
      if (encoded.good < count) {
        // LLM.int8 rounds values to F16 first, so the encoder reports values outside F16's range.
        EXPECT_EQ(std::string_view(encoding.name), "int8");
        EXPECT_GE(std::abs(floats(dtype, numbers)[encoded.good]), 65504.0f);
        continue;
      }
      for (std::size_t i = 1; i < encoded.parts.size(); ++i) {
        if (encoding.nested && i == 1) continue;  // codes
        for (const float scale : scales_of(encoded.form.parts[i], encoded.parts[i])) {
          ASSERT_TRUE(std::isfinite(scale)) << encoded.form.parts[i].name;
          ASSERT_TRUE(is_bnb || scale > 0) << encoded.form.parts[i].name;
        }
      }
      Bytes decoded(count * element_bytes(dtype));
      decode(encoding, encoded, dtype, decoded);
      const auto values = floats(dtype, decoded);
      const auto before = floats(dtype, numbers);
      for (std::size_t i = 0; i < count; ++i) {
        ASSERT_TRUE(std::isfinite(values[i])) << i << ": " << before[i] << " is " << values[i];
      }
    }
  }
}

// Control: the test detects a scale that is one step too large.
TEST(ExtremesControl, ALargerScaleMakesInfinities) {
  const Form encoding = {"fp8", "exact"};
  const Bytes numbers = of_bits(Dtype::bf16, std::vector<std::uint32_t>(count, 0x7f7f));
  Encoded encoded = encode(encoding, Dtype::bf16, numbers);
  float scale = 0;
  std::memcpy(&scale, encoded.parts[1].data(), sizeof(scale));
  scale *= 1.01f;
  std::memcpy(encoded.parts[1].data(), &scale, sizeof(scale));
  Bytes decoded(count * 2);
  decode(encoding, encoded, Dtype::bf16, decoded);
  EXPECT_TRUE(std::isinf(floats(Dtype::bf16, decoded)[0]));
}

// compressed-tensors stores the inverse of nvfp4's global scale.
TEST(Extremes, TheInverseOfNvfp4sGlobalScaleIsFiniteAndDecodes) {
  const Form encoding = {"nvfp4", "exact"};
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    for (const Pattern& pattern : patterns(dtype)) {
      SCOPED_TRACE(fmt::format("{} {}", name(dtype), pattern.name));
      const Bytes numbers = of_bits(dtype, pattern.bits);
      Encoded encoded = encode(encoding, dtype, numbers);
      float scale = 0;
      std::memcpy(&scale, encoded.parts[2].data(), sizeof(scale));
      const float inverse = 1.0f / scale;
      ASSERT_TRUE(std::isfinite(inverse) && inverse > 0);
      ASSERT_TRUE(std::isfinite(448.0f / inverse * 6.0f));
    }
  }
}

// Small values must not become zero, even if their inverse is not finite in F32.
TEST(Extremes, Nvfp4KeepsSmallNumbers) {
  std::vector<std::uint32_t> bits;
  for (std::uint32_t i = 0; i < count; ++i) bits.push_back(0x03aau + i % 64);  // near 1e-36
  const Bytes numbers = of_bits(Dtype::bf16, bits);
  const Form encoding = {"nvfp4", "exact"};
  const Encoded encoded = encode(encoding, Dtype::bf16, numbers);
  Bytes decoded(count * 2);
  decode(encoding, encoded, Dtype::bf16, decoded);
  const auto before = floats(Dtype::bf16, numbers);
  const auto after = floats(Dtype::bf16, decoded);
  double power = 0;
  double error = 0;
  for (std::size_t i = 0; i < count; ++i) {
    power += double{before[i]} * double{before[i]};
    error += (double{before[i]} - double{after[i]}) * (double{before[i]} - double{after[i]});
  }
  EXPECT_LT(std::sqrt(error / power), 0.15);
}

INSTANTIATE_TEST_SUITE_P(Each, Extremes, ::testing::ValuesIn(encodings), [](const auto& each) {
  std::string text = fmt::format("{}_{}{}", each.param.name, each.param.dialect,
                                 each.param.nested ? "_nested" : "");
  std::ranges::replace(text, '-', '_');
  return text;
});

}  // namespace
}  // namespace loadstone::test
