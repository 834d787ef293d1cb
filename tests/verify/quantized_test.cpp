// Tests the verification of quantized weights: their scales, and their distance from the original
// weights.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <random>
#include <span>

#include "codec/encode.h"
#include "kernels/cast.h"
#include "loadstone/convert.h"
#include "loadstone/quantized_tensors.h"
#include "loadstone/verify.h"
#include "support/files.h"
#include "support/hostile_cases.h"

namespace loadstone::test {
namespace {

using namespace ::testing;

constexpr std::uint64_t rows = 70;
constexpr std::uint64_t columns = 1000;

std::vector<float> numbers() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 0.02f);
  std::vector<float> values(rows * columns);
  for (float& value : values) value = normal(random);
  return values;
}

FileTensor plain() { return {"a.weight", "F32", {rows, columns}, raw_all(numbers())}; }

// Quantizes each row to 8 bits. If `written` is given, the file contains these scales instead of
// the true ones.
std::vector<FileTensor> quantized(std::vector<float> written = {}) {
  const std::vector<float> values = numbers();
  std::string bytes;
  std::vector<float> scales;
  for (std::uint64_t row = 0; row < rows; ++row) {
    float most = 0;
    for (std::uint64_t i = 0; i < columns; ++i) {
      most = std::max(most, std::abs(values[row * columns + i]));
    }
    scales.push_back(most / 127);
    for (std::uint64_t i = 0; i < columns; ++i) {
      const float code = std::nearbyint(values[row * columns + i] / scales.back());
      bytes.push_back(static_cast<char>(static_cast<int>(code)));
    }
  }
  if (!written.empty()) std::ranges::copy(written, scales.begin());
  return {{"a.weight", "I8", {rows, columns}, bytes},
          {"a.weight_scale", "F32", {rows, 1}, raw_all(scales)}};
}

std::shared_ptr<const Catalog> opened(const TemporaryFolder& folder, const std::string& name,
                                      const std::vector<FileTensor>& tensors) {
  return open_checkpoint(folder.write(name + ".safetensors", safetensors_bytes(tensors)));
}

TEST(VerifyQuantized, IsComparedWithItsNumbersEitherWay) {
  const TemporaryFolder folder;
  const auto one = opened(folder, "plain", {plain()});
  const auto other = opened(folder, "quantized", quantized());
  for (const bool turned : {false, true}) {
    const VerifyReport report = turned ? compare(*other, *one) : compare(*one, *other);
    EXPECT_TRUE(report.ok()) << to_table(report);
    ASSERT_THAT(report.quantized, SizeIs(1));
    EXPECT_EQ(report.quantized[0].encoding, "int8-channel");
    EXPECT_GT(report.quantized[0].relative, 0.001);
    EXPECT_LT(report.quantized[0].relative, 0.02);
    EXPECT_THAT(to_table(report), HasSubstr("1 of int8-channel: relative error 0.00"));
    EXPECT_THAT(to_json(report), HasSubstr("\"relative_error\""));
  }
}

TEST(VerifyQuantized, WrongScalesAreADifference) {
  const TemporaryFolder folder;
  const auto one = opened(folder, "plain", {plain()});
  const auto other = opened(folder, "quantized", quantized(std::vector<float>(rows, 1.0f / 127)));
  const VerifyReport report = compare(*one, *other);
  EXPECT_THAT(report.differences,
              ElementsAre(AllOf(Field(&Difference::name, "a.weight"),
                                Field(&Difference::kind, DifferenceKind::values))));
}

TEST(VerifyQuantized, TheSameEncodingIsComparedByBytes) {
  const TemporaryFolder folder;
  const auto one = opened(folder, "one", quantized());
  EXPECT_TRUE(compare(*one, *opened(folder, "two", quantized())).ok());
  const VerifyReport report = compare(*one, *opened(folder, "three", quantized({1.0f})));
  EXPECT_THAT(report.differences, ElementsAre(Field(&Difference::name, "a.weight_scale")));
  // The error is that of the decoded values, not of the scales.
  ASSERT_TRUE(report.differences[0].error);
  EXPECT_NEAR(report.differences[0].error->largest, 127, 0.1);
  EXPECT_THAT(report.differences[0].found, HasSubstr("; decoded values of 'a.weight': largest"));
  EXPECT_THAT(report.quantized, IsEmpty());
}

TEST(VerifyQuantized, ScalesAreFiniteAndAboveZero) {
  const TemporaryFolder folder;
  EXPECT_TRUE(verify_values(*opened(folder, "good", quantized())).ok());
  const auto code_of = [&](float scale) {
    const VerifyReport report = verify_values(*opened(folder, "bad", quantized({scale})));
    return report.findings.empty() ? "" : report.findings.front().code;
  };
  EXPECT_EQ(code_of(0.0f), "q.scale_value");
  EXPECT_EQ(code_of(-1.0f), "q.scale_value");
  EXPECT_EQ(code_of(std::numeric_limits<float>::infinity()), "q.nan");
  EXPECT_EQ(code_of(std::nanf("")), "q.nan");
  const auto found = [&](const std::vector<float>& scales) {
    return verify_values(*opened(folder, "bad", quantized(scales))).findings.front().found;
  };
  EXPECT_EQ(found({0.0f}), "1 scale that is not");
  EXPECT_EQ(found({0.0f, -1.0f}), "2 scales that are not");
}

TEST(VerifyQuantized, NanAmongItsNumbersIsFound) {
  const TemporaryFolder folder;
  const auto findings = [&](char code) {
    return verify_values(*opened(folder, "fp8",
                                 {{"a.weight", "F8_E4M3", {2, 2}, std::string("\1\2\3", 3) + code},
                                  {"a.weight_scale", "F32", {}, raw(0.5f)}}))
        .findings;
  };
  EXPECT_THAT(findings('\x7e'), IsEmpty());
  EXPECT_THAT(findings('\x7f'), ElementsAre(Field(&Finding::code, "q.nan")));
}

// ---- outputs of conversions, and damage to them

constexpr const char* weight = "layers.0.up_proj.weight";

struct Written {
  const WrittenEncoding& encoding;
  std::string name;
  std::optional<QuantizeStyle> style;
};

std::vector<Written> written_files() {
  std::vector<Written> all;
  for (const WrittenEncoding* const each : written_encodings()) {
    if (each->is_gguf()) continue;  // GGUF encodings cannot be stored in safetensors files
    const std::string name(each->name);
    if (each->is_bitsandbytes()) {
      all.push_back({*each, name, std::nullopt});
      continue;
    }
    if (!each->unified_names.empty()) {
      all.push_back({*each, name + "-unified", QuantizeStyle::unified});
    }
    if (!each->compressed_names.empty()) {
      all.push_back({*each, name + "-compressed", QuantizeStyle::compressed_tensors});
    }
  }
  return all;
}

// Writes a file with one weight for each row size, converts it, and returns the output's path.
std::string converted(const TemporaryFolder& folder, const std::string& source,
                      const Written& written) {
  ConvertOptions options;
  options.quantize.formats = {{.quantization = parse_quantization(written.encoding.name)}};
  options.quantize.style = written.style;
  const std::string target = folder / written.name;
  convert(make_conversion(open_checkpoint(source), options), target);
  return target;
}

// Changes the bytes of a tensor in its file.
void edit(const Catalog& catalog, std::uint32_t tensor,
          const std::function<void(std::span<std::byte>)>& change) {
  const TensorInfo& info = catalog.tensors()[tensor];
  const std::string& path = catalog.shards()[info.shard].path;
  std::string file = read_file(path);
  const auto bytes = std::as_writable_bytes(std::span(file));
  change(bytes.subspan(info.offset_begin, info.byte_count()));
  std::ofstream(path, std::ios::binary) << file;
}

void scale_by(const Catalog& catalog, std::uint32_t tensor, int power) {
  const Dtype dtype = catalog.tensors()[tensor].encoding.dtype();
  edit(catalog, tensor, [&](std::span<std::byte> bytes) {
    if (dtype == Dtype::u8) {  // exponents
      for (auto& each : bytes) each = static_cast<std::byte>(static_cast<int>(each) + power);
      return;
    }
    std::vector<float> wide(bytes.size() / element_bytes(dtype));
    auto* const values = reinterpret_cast<std::byte*>(wide.data());
    cast_between(dtype, Dtype::f32).run(bytes.data(), values, wide.size());
    for (float& value : wide) value = std::ldexp(value, power);
    cast_between(Dtype::f32, dtype).run(values, bytes.data(), wide.size());
  });
}

std::string plain_file(const TemporaryFolder& folder, const std::vector<float>& numbers) {
  const std::uint64_t size = numbers.size() / 512;
  return folder.write("plain.safetensors",
                      safetensors_bytes({{weight, "F32", {size, 512}, raw_all(numbers)}}));
}

std::vector<float> normal_numbers(std::size_t count) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0, 0.02f);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

TEST(VerifyQuantized, WhatConversionsWriteIsExplainedEitherWay) {
  const TemporaryFolder folder;
  std::vector<float> values = normal_numbers(512 * 512);
  values[60000] = 50;  // the largest value, at an index that is not sampled
  const auto one = open_checkpoint(plain_file(folder, values));
  std::vector<std::shared_ptr<const Catalog>> others;
  for (const Written& written : written_files()) {
    const auto other = open_checkpoint(converted(folder, one->shards()[0].path, written));
    for (const VerifyReport& report : {compare(*one, *other), compare(*other, *one)}) {
      EXPECT_TRUE(report.ok()) << written.name << "\n" << to_table(report);
      ASSERT_THAT(report.quantized, SizeIs(1)) << written.name;
      EXPECT_EQ(report.quantized[0].encoding, written.encoding.name);
      EXPECT_GT(report.quantized[0].relative, 0) << written.name;
    }
    others.push_back(other);
  }
  // The two files are rounded differently, and neither has the original values.
  for (const auto& other : others) {
    const VerifyReport report = compare(*others.front(), *other);
    for (const Difference& each : report.differences) EXPECT_NE(each.kind, DifferenceKind::values);
  }
}

TEST(VerifyQuantized, WrongScalesAndOrdersOfEachEncodingAreDifferences) {
  const TemporaryFolder folder;
  const auto one = open_checkpoint(plain_file(folder, normal_numbers(256 * 512)));
  for (const Written& written : written_files()) {
    const std::string path = converted(folder, one->shards()[0].path, written);
    const auto expect_found = [&](const char* what) {
      const VerifyReport report = compare(*one, *open_checkpoint(path));
      EXPECT_THAT(report.differences,
                  ElementsAre(AllOf(Field(&Difference::name, weight),
                                    Field(&Difference::kind, DifferenceKind::values))))
          << written.name << ": " << what;
    };
    const auto other = open_checkpoint(path);
    const QuantizedTensor found = find_quantized_tensors(*other).tensors().front();
    scale_by(*other, found.scales.back(), 1);
    expect_found("scales doubled");
    scale_by(*other, found.scales.back(), -2);
    expect_found("scales halved");
    scale_by(*other, found.scales.back(), 1);
    EXPECT_TRUE(compare(*one, *open_checkpoint(path)).ok()) << written.name;
    edit(*other, found.data, [&](std::span<std::byte> codes) {
      if (written.encoding.bits == 4) {
        for (std::byte& code : codes) code = (code << 4) | (code >> 4);
      } else {
        std::rotate(codes.begin(), codes.begin() + 1, codes.end());
      }
    });
    expect_found("another order");
  }
}

// Checks the manifest's files that open without an error but contain damaged weights.
TEST(VerifyQuantized, FindsWhatTheManifestSays) {
  const auto& cases = quantized_cases();
  EXPECT_THAT(cases, SizeIs(13));
  for (const HostileCase& test : cases) {
    const VerifyReport report = verify_values(*open_checkpoint(test.path));
    ASSERT_THAT(report.findings, SizeIs(1)) << test.name;
    EXPECT_EQ(report.findings[0].code, test.expect) << test.name;
    EXPECT_EQ(report.findings[0].severity == Severity::error, test.accept == "no") << test.name;
    EXPECT_THAT(report.findings[0].message, HasSubstr(test.culprit)) << test.name;
  }
}

TEST(VerifyQuantized, AWeightWithoutItsScalesIsAnError) {
  const TemporaryFolder folder;
  folder.write("config.json", R"({"quantization_config": {"quant_method": "fp8"}})");
  const VerifyReport report = verify_values(
      *opened(folder, "lone", {{"a.weight", "F8_E4M3", {2, 2}, std::string("\1\2\3\4", 4)}}));
  EXPECT_THAT(report.findings, ElementsAre(AllOf(Field(&Finding::code, "q.scale_missing"),
                                                 Field(&Finding::severity, Severity::error))));
}

}  // namespace
}  // namespace loadstone::test
