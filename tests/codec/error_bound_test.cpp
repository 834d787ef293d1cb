// Tests that every encoded value is within the error bound, and that damaged data exceeds the
// bound.
#include "codec/error_bound.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "codec/decode.h"
#include "codec/encode.h"
#include "kernels/bnb.h"
#include "kernels/cast.h"

namespace loadstone {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::uint64_t rows = 256;
constexpr std::uint64_t columns = 512;
constexpr std::uint64_t count = rows * columns;

struct Sample {
  const char* name;
  std::function<float(std::size_t place)> number;
};

// Returns ordinary weights, and extreme values that no encoding represents well.
std::vector<Sample> samples() {
  static std::mt19937 random(5);
  static std::normal_distribution<float> normal;
  return {
      {"normal", [](std::size_t) { return 0.02f * normal(random); }},
      {"heavy tails", [](std::size_t) { return std::pow(normal(random), 5.0f); }},
      {"an outlier", [](std::size_t i) { return i == 777 ? 3000.0f : 0.01f * normal(random); }},
      {"outliers in rows",
       [](std::size_t i) { return (i % columns == 3 ? 500.0f : 0.1f) * normal(random); }},
      {"blocks of all sizes",
       [](std::size_t i) {
         return std::ldexp(normal(random), static_cast<int>(i / 16 * 7 % 24) - 16);
       }},
      {"tiny", [](std::size_t) { return 1e-6f * normal(random); }},
      {"nothing but zeros, and one",
       [](std::size_t i) { return i % 1000 == 999 ? normal(random) : 0.0f; }},
      {"steps of a power of two",
       [](std::size_t i) { return static_cast<float>(static_cast<int>(i % 97) - 48) / 64.0f; }},
      {"large", [](std::size_t) { return 6000.0f * std::tanh(normal(random)); }},
  };
}

Bytes numbers_of(const Sample& sample, Dtype dtype) {
  std::vector<float> wide(count);
  for (std::size_t i = 0; i < count; ++i) wide[i] = sample.number(i);
  Bytes bytes(count * element_bytes(dtype));
  cast_between(Dtype::f32, dtype)
      .run(reinterpret_cast<const std::byte*>(wide.data()), bytes.data(), count);
  return bytes;
}

std::vector<float> widened(const Bytes& bytes, Dtype dtype) {
  std::vector<float> wide(count);
  cast_between(dtype, Dtype::f32)
      .run(bytes.data(), reinterpret_cast<std::byte*>(wide.data()), count);
  return wide;
}

// The components of a quantized tensor, and the decoder that reads them.
struct Stored {
  const DecodeKernel* kernel;
  PreparedDecoder form;
  std::vector<Bytes> parts;

  [[nodiscard]] std::vector<float> numbers() const {
    std::vector<const std::byte*> from;
    for (const Bytes& part : parts) from.push_back(part.data());
    from.resize(Decoder::parts_max, nullptr);
    std::vector<float> wide(count);
    decode(form, 0, count, from, reinterpret_cast<std::byte*>(wide.data()));
    return wide;
  }
  // Decodes after filling component i with byte i of `bytes`.
  [[nodiscard]] std::vector<float> with_bytes(std::initializer_list<std::byte> bytes) const {
    Stored other = *this;
    std::size_t part = 0;
    for (const std::byte byte : bytes) std::ranges::fill(other.parts[part++], byte);
    return other.numbers();
  }
};

Stored stored(const Quantization& quantization, const Bytes& numbers, Dtype dtype) {
  const WrittenEncoding& encoding = written_encoding(quantization);
  QuantizedLayout form;
  EXPECT_FALSE(prepare_quantization(quantization, {rows, columns}, dtype, form));
  Stored made = {find_decode_kernel(encoding.kernel), {}, {}};
  std::vector<float> amax(form.stack);
  if (form.needs_amax) measure_window(form, 0, count, numbers.data(), amax);
  std::vector<DecodePart> described;
  std::vector<std::byte*> places;
  for (const QuantizedPart& part : form.parts) {
    made.parts.emplace_back(part.byte_count());
    described.push_back({part.dtype, part.shape});
  }
  for (Bytes& part : made.parts) places.push_back(part.data());
  Bytes scratch(form.scratch_bytes);
  EXPECT_EQ(quantize_window(form, 0, count, numbers.data(), places, amax, scratch.data()), count);
  finish_quantized(form, places, amax, scratch.data());
  float offset = 0;
  if (form.nested) {  // the offset is stored in the state, next to the code table of the scales
    std::memcpy(&offset, made.parts[3].data(), sizeof(offset));
    const auto map = std::as_bytes(bnb_dynamic_map());
    made.parts[3].assign(map.begin(), map.end());
    described[3] = {Dtype::f32, {256}};
  }
  const auto problem = prepare_decoding(encoding.kernel, described, {rows, columns}, Dtype::f32,
                                        offset, made.form, form.group_size);
  EXPECT_FALSE(problem) << encoding.name << ": " << problem->message;
  return made;
}

// Returns the error bound of each value, computed as verify does.
std::vector<double> bounds(const Stored& stored, const std::vector<float>& numbers) {
  const ErrorBound& bound = *stored.kernel->error;
  const std::vector<float> reach = stored.with_bytes({bound.top_code});
  std::vector<float> outer(count);
  if (bound.of_outer > 0 && stored.parts.size() > 2) {
    outer = stored.with_bytes({bound.top_code, bound.top_scale});
  }
  std::vector<double> made(count);
  for (std::size_t i = 0; i < count; ++i) {
    made[i] = bound.relative * std::abs(double{numbers[i]}) +
              bound.of_reach * std::abs(double{reach[i]}) +
              bound.of_outer * std::abs(double{outer[i]}) + bound.constant;
  }
  return made;
}

double root_mean_square(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum / static_cast<double>(values.size()));
}

std::vector<double> errors(const Stored& stored, const std::vector<float>& numbers) {
  const std::vector<float> found = stored.numbers();
  std::vector<double> made(count);
  for (std::size_t i = 0; i < count; ++i) made[i] = std::abs(double{numbers[i]} - found[i]);
  return made;
}

std::vector<Quantization> quantizations() {
  std::vector<Quantization> all;
  for (const WrittenEncoding* const each : written_encodings()) {
    if (each->is_gguf()) continue;  // GGUF encodings have no bound for single values
    const std::string name(each->name);
    all.push_back({.encoding = name, .nested_offset = {}});
    if (each->is_bitsandbytes()) {
      all.push_back({.encoding = name, .dialect = "bnb-cuda", .nested_offset = {}});
    } else if (!each->unified_names.empty()) {
      all.push_back({.encoding = name, .dialect = "modelopt-compat", .nested_offset = {}});
    }
    if (!each->exported_dialect.empty()) {
      all.push_back(
          {.encoding = name, .dialect = std::string(each->exported_dialect), .nested_offset = {}});
    }
    if (!each->takes_block_size) continue;
    all.push_back({.encoding = name, .block_size = 4096, .nested_offset = {}});
    all.push_back({.encoding = name, .nested = true, .nested_offset = {}});
  }
  return all;
}

std::string text(const Quantization& quantization) {
  return quantization.encoding + " " + quantization.dialect + " " +
         std::to_string(quantization.block_size) + (quantization.nested ? " nested" : "");
}

TEST(ErrorBound, HoldsForEachNumber) {
  for (const Quantization& quantization : quantizations()) {
    for (const Sample& sample : samples()) {
      for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
        // The encoder rounds subnormal scales like the library, by more than the bound allows.
        const bool is_packed = written_encoding(quantization).kind == QuantizeKind::int4_packed;
        if (is_packed && dtype == Dtype::f16 && sample.name == std::string("tiny")) continue;
        const Bytes bytes = numbers_of(sample, dtype);
        const std::vector<float> numbers = widened(bytes, dtype);
        const Stored made = stored(quantization, bytes, dtype);
        ASSERT_NE(made.kernel->error, nullptr) << text(quantization);
        const std::vector<double> found = errors(made, numbers);
        const std::vector<double> most = bounds(made, numbers);
        for (std::size_t i = 0; i < count; ++i) {
          ASSERT_TRUE(found[i] <= most[i])
              << text(quantization) << ", " << sample.name << ", " << name(dtype) << " at " << i
              << ": " << numbers[i] << " is off by " << found[i] << ", not " << most[i];
        }
      }
    }
  }
}

// A bound must be at most a few times the usual error, or it would hide damage.
TEST(ErrorBound, IsNearTheError) {
  for (const Quantization& quantization : quantizations()) {
    const Bytes bytes = numbers_of(samples().front(), Dtype::bf16);
    const std::vector<float> numbers = widened(bytes, Dtype::bf16);
    const Stored made = stored(quantization, bytes, Dtype::bf16);
    const double ratio =
        root_mean_square(bounds(made, numbers)) / root_mean_square(errors(made, numbers));
    EXPECT_GT(ratio, 1) << text(quantization);
    EXPECT_LT(ratio, 6) << text(quantization);
  }
}

// Multiplies the scales in one component by a power of two, in any dtype. Returns false if the
// dtype cannot represent the result.
void scale_by(Stored& stored, const Quantization& quantization, int power) {
  QuantizedLayout form;
  ASSERT_FALSE(prepare_quantization(quantization, {rows, columns}, Dtype::bf16, form));
  const std::size_t last = form.nested ? 2 : form.parts.size() - 1;
  const Dtype dtype = form.parts[last].dtype;
  Bytes& scales = stored.parts[last];
  if (dtype == Dtype::u8) {  // exponents
    for (std::byte& scale : scales) scale = static_cast<std::byte>(static_cast<int>(scale) + power);
    return;
  }
  const std::size_t elements = scales.size() / element_bytes(dtype);
  std::vector<float> wide(elements);
  auto* const values = reinterpret_cast<std::byte*>(wide.data());
  cast_between(dtype, Dtype::f32).run(scales.data(), values, elements);
  for (float& scale : wide) scale = std::ldexp(scale, power);
  cast_between(Dtype::f32, dtype).run(values, scales.data(), elements);
}

void swap_halves(Bytes& codes) {
  for (std::byte& code : codes) code = (code << 4) | (code >> 4);
}

TEST(ErrorBound, IsExceededByWrongScalesAndOrders) {
  const Bytes bytes = numbers_of(samples().front(), Dtype::bf16);
  const std::vector<float> numbers = widened(bytes, Dtype::bf16);
  for (const Quantization& quantization : quantizations()) {
    const Stored good = stored(quantization, bytes, Dtype::bf16);
    const auto is_found = [&](const Stored& bad) {
      return root_mean_square(errors(bad, numbers)) > root_mean_square(bounds(bad, numbers));
    };
    EXPECT_FALSE(is_found(good)) << text(quantization);
    for (const int power : {1, -1, 3, -3}) {
      // Nested scales depend mostly on their offset, which scale_by() does not change.
      if (quantization.nested) continue;
      Stored bad = good;
      scale_by(bad, quantization, power);
      EXPECT_TRUE(is_found(bad)) << text(quantization) << " times 2^" << power;
    }
    Stored moved = good;
    std::rotate(moved.parts[0].begin(), moved.parts[0].begin() + 1, moved.parts[0].end());
    EXPECT_TRUE(is_found(moved)) << text(quantization) << " moved by a byte";
    if (written_encoding(quantization).bits != 4) continue;
    Stored swapped = good;
    swap_halves(swapped.parts[0]);
    EXPECT_TRUE(is_found(swapped)) << text(quantization) << " with halves swapped";
  }
}

}  // namespace
}  // namespace loadstone
