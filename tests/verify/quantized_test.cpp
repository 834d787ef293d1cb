// Weights that are stored quantized: their scales, and their distance from what they were made of.
#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <random>

#include "loadstone/verify.h"
#include "support/files.h"
#include "support/hostile_cases.h"

namespace loadstone::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

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

// By rows, to 8 bits: the bytes are right for these scales, whatever is written in their place.
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

// The cases of the manifest whose files open: what is wrong are the weights in them.
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
