// Tests windows of ModelOpt's encodings and of GGUF blocks. Windows encoded in any order, by
// several threads and on every instruction set must give the same bytes as one call for the whole
// value. python/tests/convert/test_modelopt_kernels.py and test_gguf_encoders.py compare the bytes
// with independent implementations.
#include "kernels/quantize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "codec/encode.h"
#include "kernels/cast.h"
#include "kernels/forced_target.h"

namespace loadstone {
namespace {

using Bytes = std::vector<std::byte>;

struct Case {
  std::string encoding;
  Shape shape;
  std::string dialect = "exact";
  bool has_importance = false;
};

// Returns cases that include short blocks if the encoding allows them, and stacks whose matrices
// end within a block.
const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"fp8", {2, 37, 41}},
      {"fp8", {33, 100}, "modelopt-compat"},
      {"fp8", {5000}},
      {"fp8", {33, 100}, "modelopt-export"},
      {"fp8-channel", {3, 19, 77}},
      {"fp8-channel", {40, 77}, "modelopt-compat"},
      {"fp8-block", {300, 200}},
      {"fp8-block", {2, 256, 130}, "modelopt-compat"},
      {"fp8-block", {3, 130, 131}},
      {"int8-channel", {3, 19, 77}},
      {"int8-channel", {41, 33}, "modelopt-compat"},
      {"int4", {2, 6, 192}},
      {"int4", {64, 66}, "modelopt-compat"},
      {"int4-awq", {3, 10, 256}},
      {"int4-packed", {37, 384}, "compressed-tensors"},
      {"int4-packed-32", {41, 96}, "compressed-tensors"},
      {"nvfp4", {3, 20, 48}},
      {"nvfp4", {2, 21, 37}},
      {"nvfp4", {70, 64}, "modelopt-compat"},
      {"mxfp4", {2, 11, 96}},
      {"mxfp4", {20, 64}, "modelopt-compat"},
      {"mxfp8", {2, 11, 96}},
      {"mxfp8", {23, 45}, "modelopt-compat"},
      {"q4_0", {3, 11, 96}, "ggml"},
      {"q4_1", {20, 64}, "ggml"},
      {"q5_0", {20, 64}, "ggml"},
      {"q5_1", {20, 64}, "ggml"},
      {"q8_0", {2, 3, 11, 32}, "ggml"},
      {"q2_k", {7, 768}, "ggml"},
      {"q3_k", {3, 5, 256}, "ggml"},
      {"q4_k", {7, 768}, "ggml"},
      {"q5_k", {5, 768}, "ggml"},
      {"q6_k", {5, 768}, "ggml"},
      {"iq4_nl", {20, 64}, "ggml"},
      {"iq4_xs", {5, 768}, "ggml"},
      {"tq1_0", {5, 768}, "ggml"},
      {"tq2_0", {5, 768}, "ggml"},
      {"mxfp4-gguf", {20, 64}, "ggml"},
      {"nvfp4-gguf", {3, 20, 128}, "ggml"},
      {"nvfp4-gguf", {7, 2304}, "ggml"},
      {"q4_0", {2, 3, 4160}, "ggml", true},
      {"q5_1", {2, 11, 96}, "ggml", true},
      {"q8_0", {2, 11, 96}, "ggml", true},
      {"q3_k", {3, 5, 256}, "ggml", true},
      {"q4_k", {7, 2304}, "ggml", true},
      {"iq4_nl", {20, 64}, "ggml", true},
      {"iq2_s", {3, 768}, "ggml"},
      {"iq3_xxs", {3, 768}, "ggml"},
      {"iq3_s", {3, 768}, "ggml"},
      {"iq1_m", {3, 768}, "ggml"},
      {"iq2_xxs", {3, 5, 256}, "ggml", true},
      {"iq2_xs", {3, 768}, "ggml", true},
      {"iq2_s", {3, 768}, "ggml", true},
      {"iq3_xxs", {3, 768}, "ggml", true},
      {"iq1_s", {3, 768}, "ggml", true},
      {"iq1_m", {3, 768}, "ggml", true},
  };
  return all;
}

constexpr std::array dtypes = {Dtype::f32, Dtype::f16, Dtype::bf16};

QuantizedLayout form_of(const Case& one, Dtype dtype) {
  QuantizedLayout form;
  Quantization quantization = {
      .encoding = one.encoding, .dialect = one.dialect, .nested_offset = {}};
  if (one.has_importance) {
    std::vector<float> importance(one.shape.extents().back());
    for (std::size_t i = 0; i < importance.size(); ++i) {
      importance[i] = static_cast<float>(i * 37 % 100);
    }
    quantization.importance = std::make_shared<const std::vector<float>>(std::move(importance));
  }
  const auto problem = prepare_quantization(quantization, one.shape, dtype, form);
  EXPECT_FALSE(problem) << one.encoding << ": " << problem->message;
  return form;
}

Bytes numbers_of(std::uint64_t count, Dtype dtype) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(count);
  for (float& number : numbers) {
    const float value = normal(random);
    number = random() % 8 == 0 ? 0.0f : value * value * value;
  }
  for (std::uint64_t i = 0; i + 700 < count; i += 1000) {
    std::fill_n(numbers.begin() + static_cast<std::ptrdiff_t>(i), 70, -0.0f);
  }
  Bytes bytes(count * element_bytes(dtype));
  cast_between(Dtype::f32, dtype)
      .run(reinterpret_cast<const std::byte*>(numbers.data()), bytes.data(), count);
  return bytes;
}

struct Parts {
  std::vector<Bytes> bytes;

  explicit Parts(const QuantizedLayout& form) {
    for (const QuantizedPart& part : form.parts) {
      bytes.emplace_back(part.byte_count(), std::byte{0xa5});
    }
  }
  std::vector<std::byte*> places(std::span<const PartRange> ranges) {
    std::vector<std::byte*> found;
    for (std::size_t i = 0; i < bytes.size(); ++i)
      found.push_back(bytes[i].data() + ranges[i].begin);
    return found;
  }
  friend bool operator==(const Parts&, const Parts&) = default;
};

using Windows = std::vector<std::pair<std::uint64_t, std::uint64_t>>;

Windows windows_of(const QuantizedLayout& form, std::uint64_t length) {
  Windows windows;
  for (std::uint64_t at = 0; at < form.elements; at += length) {
    windows.emplace_back(at, std::min(at + length, form.elements));
  }
  return windows;
}

std::vector<float> measured(const QuantizedLayout& form, const Bytes& numbers,
                            const Windows& windows) {
  std::vector<float> amax(form.needs_amax ? form.stack : 0);
  if (!form.needs_amax) return amax;
  for (const auto& [begin, end] : windows) {
    const std::byte* const from = numbers.data() + begin * element_bytes(form.dtype);
    EXPECT_EQ(measure_window(form, begin, end, from, amax), end);
  }
  return amax;
}

void encode_window(const QuantizedLayout& form, const Bytes& numbers, std::span<const float> amax,
                   std::uint64_t begin, std::uint64_t end, Parts& parts) {
  std::vector<PartRange> ranges(form.parts.size());
  part_ranges(form, begin, end, ranges);
  const std::uint64_t good =
      quantize_window(form, begin, end, numbers.data() + begin * element_bytes(form.dtype),
                      parts.places(ranges), amax, nullptr);
  EXPECT_EQ(good, end);
}

void finish(const QuantizedLayout& form, std::span<const float> amax, Parts& parts) {
  const std::vector<PartRange> all(form.parts.size());
  finish_quantized(form, parts.places(all), amax, nullptr);
}

Parts encoded(const QuantizedLayout& form, const Bytes& numbers) {
  Parts parts(form);
  const std::vector<float> amax = measured(form, numbers, {{0, form.elements}});
  encode_window(form, numbers, amax, 0, form.elements, parts);
  finish(form, amax, parts);
  return parts;
}

TEST(Quantize, WindowsMayComeInAnyOrder) {
  std::mt19937 random(1);
  for (const Case& one : cases()) {
    for (const Dtype dtype : dtypes) {
      const QuantizedLayout form = form_of(one, dtype);
      const Bytes numbers = numbers_of(form.elements, dtype);
      const Parts expected = encoded(form, numbers);
      for (const unsigned factor : {1u, 3u}) {
        Windows windows = windows_of(form, factor * form.window_elements);
        std::ranges::shuffle(windows, random);
        Parts parts(form);
        const std::vector<float> amax = measured(form, numbers, windows);
        for (const auto& [begin, end] : windows) {
          encode_window(form, numbers, amax, begin, end, parts);
        }
        finish(form, amax, parts);
        EXPECT_EQ(parts, expected) << one.encoding << " " << one.shape.text() << " " << name(dtype);
      }
    }
  }
}

TEST(Quantize, RangesOfWindowsCoverThePartsOnce) {
  for (const Case& one : cases()) {
    const QuantizedLayout form = form_of(one, Dtype::bf16);
    std::vector<std::uint64_t> next(form.parts.size());
    for (const auto& [begin, end] : windows_of(form, form.window_elements)) {
      std::vector<PartRange> ranges(form.parts.size());
      part_ranges(form, begin, end, ranges);
      for (std::size_t i = 0; i < ranges.size(); ++i) {
        if (ranges[i].size() == 0) continue;
        EXPECT_EQ(ranges[i].begin, next[i]) << one.encoding << " part " << i;
        next[i] = ranges[i].end;
      }
    }
    for (std::size_t i = 0; i < next.size(); ++i) {
      const bool is_of_all = form.needs_amax && i + 1 == next.size();
      EXPECT_EQ(next[i], is_of_all ? 0 : form.parts[i].byte_count()) << one.encoding << " " << i;
    }
  }
}

TEST(Quantize, ThreadsGiveTheSame) {
  for (const Case& one : cases()) {
    const QuantizedLayout form = form_of(one, Dtype::bf16);
    const Bytes numbers = numbers_of(form.elements, Dtype::bf16);
    const Windows windows = windows_of(form, form.window_elements);
    const std::vector<float> amax = measured(form, numbers, windows);
    Parts parts(form);
    std::vector<std::thread> threads;
    for (std::size_t thread = 0; thread < 3; ++thread) {
      threads.emplace_back([&, thread] {
        for (std::size_t i = thread; i < windows.size(); i += 3) {
          encode_window(form, numbers, amax, windows[i].first, windows[i].second, parts);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    finish(form, amax, parts);
    EXPECT_EQ(parts, encoded(form, numbers)) << one.encoding;
  }
}

Bytes decoded(const QuantizedLayout& form, Parts& parts, Dtype target, const Windows& windows) {
  Bytes numbers(form.elements * element_bytes(target));
  for (const auto& [begin, end] : windows) {
    std::vector<PartRange> ranges(form.parts.size());
    part_ranges(form, begin, end, ranges);
    const auto places = parts.places(ranges);
    const std::vector<const std::byte*> from(places.begin(), places.end());
    dequantize_window(form, begin, end, from, target,
                      numbers.data() + begin * element_bytes(target));
  }
  return numbers;
}

TEST(Quantize, WindowsAreDecodedAsTheWhole) {
  for (const Case& one : cases()) {
    for (const Dtype dtype : dtypes) {
      const QuantizedLayout form = form_of(one, Dtype::bf16);
      Parts parts = encoded(form, numbers_of(form.elements, Dtype::bf16));
      const Bytes whole = decoded(form, parts, dtype, {{0, form.elements}});
      EXPECT_EQ(decoded(form, parts, dtype, windows_of(form, form.window_elements)), whole);
    }
  }
}

// The error must be at most half of the encoding's largest step, times the largest value that
// shares the scale. Grid formats minimise the sum of squared errors instead.
TEST(Quantize, WhatIsDecodedIsNear) {
  for (const Case& one : cases()) {
    const QuantizedLayout form = form_of(one, Dtype::f32);
    const Bytes numbers = numbers_of(form.elements, Dtype::f32);
    Parts parts = encoded(form, numbers);
    const Bytes back = decoded(form, parts, Dtype::f32, {{0, form.elements}});
    const auto* const x = reinterpret_cast<const float*>(numbers.data());
    const auto* const y = reinterpret_cast<const float*>(back.data());
    float most = 0;
    float error = 0;
    for (std::uint64_t i = 0; i < form.elements; ++i) {
      most = std::max(most, std::abs(x[i]));
      error = std::max(error, std::abs(x[i] - y[i]));
    }
    const bool is_ternary = one.encoding.starts_with("tq");
    const bool is_of_grid = one.encoding.starts_with("iq") && !one.encoding.starts_with("iq4");
    const float share = is_of_grid ? 0.6f : is_ternary ? 0.501f : 0.2f;
    EXPECT_LE(error, most * share) << one.encoding;
    EXPECT_GT(error, 0) << one.encoding;  // control
  }
}

TEST(Quantize, InstructionSetsGiveTheSame) {
  std::set<std::int64_t> seen;
  for (const Case& one : cases()) {
    for (const Dtype dtype : dtypes) {
      const QuantizedLayout form = form_of(one, dtype);
      const Bytes numbers = numbers_of(form.elements, dtype);
      Parts expected = encoded(form, numbers);
      const Bytes back = decoded(form, expected, dtype, {{0, form.elements}});
      for (const std::int64_t isa : hwy::SupportedAndGeneratedTargets()) {
        const ForcedTarget forced(isa);
        seen.insert(hwy::SupportedTargets());  // control: each target must really be forced
        EXPECT_EQ(encoded(form, numbers), expected)
            << hwy::TargetName(isa) << " " << one.encoding << " " << name(dtype);
        EXPECT_EQ(decoded(form, expected, dtype, {{0, form.elements}}), back)
            << hwy::TargetName(isa) << " " << one.encoding << " " << name(dtype);
      }
    }
  }
  EXPECT_EQ(seen.size(), hwy::SupportedAndGeneratedTargets().size());
}

TEST(Quantize, TheFirstNumberThatIsNotFiniteIsNamed) {
  for (const Case& one : cases()) {
    for (const std::uint64_t place : {0u, 5u, 1203u, 1289u}) {
      const QuantizedLayout form = form_of(one, Dtype::f32);
      Bytes numbers = numbers_of(form.elements, Dtype::f32);
      for (const std::uint64_t at : {form.elements - 1, place}) {
        if (at >= form.elements) continue;
        const float value = at == place ? NAN : INFINITY;
        std::memcpy(numbers.data() + 4 * at, &value, sizeof(value));
      }
      if (place >= form.elements) continue;
      std::vector<float> amax(form.stack);
      EXPECT_EQ(measure_window(form, 0, form.elements, numbers.data(), amax), place);
      EXPECT_TRUE(std::ranges::all_of(amax, [](float most) { return std::isfinite(most); }));
      if (!form.needs_amax) amax.clear();
      Parts parts(form);
      const std::vector<PartRange> all(form.parts.size());
      EXPECT_EQ(
          quantize_window(form, 0, form.elements, numbers.data(), parts.places(all), amax, nullptr),
          place)
          << one.encoding;
    }
  }
}

}  // namespace
}  // namespace loadstone
