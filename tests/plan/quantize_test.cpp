// Tests plans that quantize targets during the load, and rejected requests.
#include <gmock/gmock.h>

#include <memory>
#include <utility>
#include <vector>

#include "loadstone/plan.h"
#include "plan/plan_json.h"
#include "support/errors.h"
#include "support/plans.h"

namespace loadstone::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Target tie_of(const std::string& name, Target target) {
  target.tie_of = std::exchange(target.name, name);
  return target;
}

const Quantization nf4 = {.encoding = "nf4", .dialect = {}, .nested_offset = {}};
const Quantization nested = {.encoding = "nf4", .dialect = {}, .nested = true, .nested_offset = {}};

Plan plan_of_one(const Quantization& quantization, Shape shape = {10, 13},
                 Dtype dtype = Dtype::bf16, PlanOptions options = {}) {
  options.quantize = {{"w", quantization}};
  return make_plan(fake_catalog({{"w", shape, Dtype::bf16}}),
                   skeleton_of({target_of("w", shape, dtype)}), options);
}

std::vector<std::string> parts_of(const PlannedTarget& target) {
  std::vector<std::string> text;
  for (const auto& part : quantized_parts(*target.quantization, target.shape, target.dtype)) {
    text.push_back(part.name + " " + std::string(name(part.dtype)) + " " + part.shape.text());
  }
  return text;
}

TEST(Quantize, PartsHaveTheShapesOfTheirEncoding) {
  EXPECT_THAT(parts_of(plan_of_one(nf4).targets[0]),
              ElementsAre("data U8 [65, 1]", "absmax F32 [3]"));
  EXPECT_THAT(parts_of(plan_of_one(nested).targets[0]),
              ElementsAre("data U8 [65, 1]", "absmax U8 [3]", "nested_absmax F32 [1]",
                          "nested_offset F32 []"));
  EXPECT_THAT(
      parts_of(plan_of_one({.encoding = "int8", .dialect = {}, .nested_offset = {}}).targets[0]),
      ElementsAre("data I8 [10, 13]", "absmax F32 [10]"));
}

TEST(Quantize, PartsOfAStackKeepItsDimensions) {
  const auto parts = [](const std::string& encoding, const std::string& dialect) {
    return parts_of(
        plan_of_one({.encoding = encoding, .dialect = dialect, .nested_offset = {}}, {4, 256, 384})
            .targets[0]);
  };
  EXPECT_THAT(parts("fp8", ""), ElementsAre("data F8_E4M3 [4, 256, 384]", "scale F32 [4]"));
  EXPECT_THAT(parts("fp8-channel", "modelopt-compat"),
              ElementsAre("data F8_E4M3 [4, 256, 384]", "scale BF16 [4, 256]"));
  EXPECT_THAT(parts("fp8-block", ""),
              ElementsAre("data F8_E4M3 [4, 256, 384]", "scale F32 [4, 2, 3]"));
  EXPECT_THAT(parts("int8-channel", ""),
              ElementsAre("data I8 [4, 256, 384]", "scale F32 [4, 256, 1]"));
  EXPECT_THAT(parts("int4", "modelopt-compat"),
              ElementsAre("data U8 [4, 256, 192]", "scale BF16 [4, 768, 1]"));
  EXPECT_THAT(parts("int4-awq", "modelopt-compat"),
              ElementsAre("data U8 [4, 128, 384]", "scale F32 [4, 256, 3]"));
  EXPECT_THAT(parts("nvfp4", ""), ElementsAre("data U8 [4, 256, 192]", "scale F8_E4M3 [4, 256, 24]",
                                              "scale_2 F32 [4]"));
  EXPECT_THAT(parts("mxfp4", ""), ElementsAre("data U8 [4, 256, 192]", "scale U8 [4, 256, 12]"));
  EXPECT_THAT(parts("mxfp8", ""),
              ElementsAre("data F8_E4M3 [4, 256, 384]", "scale U8 [4, 256, 12]"));
}

TEST(Quantize, SizesAreThoseOfTheParts) {
  const Plan plan = plan_of_one(nf4, {10, 13}, Dtype::f32);
  EXPECT_TRUE(plan.ok());
  EXPECT_EQ(plan.targets[0].byte_count(), 65u + 12u);
  EXPECT_EQ(plan.bytes_to_read, 260u);
  EXPECT_EQ(plan.peak_bytes.at("cpu"), 65u + 12u + 2u * (576u + 260u));  // components and staging
  PlanOptions balanced;
  balanced.device_map.mode = DeviceMapMode::sequential;
  balanced.max_memory = {{"cuda:0", 100}, {"cpu", 1000}};
  EXPECT_EQ(plan_of_one(nf4, {10, 13}, Dtype::f32, balanced).targets[0].device, "cuda:0");
}

// bitsandbytes writes different bytes on CPU and GPU, so the dialect depends on the target's
// device.
TEST(Quantize, TheDialectIsThatOfTheDevice) {
  const auto dialect = [](const Quantization& quantization, const char* device) {
    PlanOptions options;
    options.device_map.entries = {{"", device}};
    return plan_of_one(quantization, {64, 64}, Dtype::bf16, options)
        .targets[0]
        .quantization->dialect;
  };
  for (const char* encoding : {"nf4", "fp4", "int8"}) {
    const Quantization quantization = {.encoding = encoding, .dialect = {}, .nested_offset = {}};
    EXPECT_EQ(dialect(quantization, "cuda:1"), "bnb-cuda");
    EXPECT_EQ(dialect(quantization, "cpu"), "");
    EXPECT_EQ(dialect(quantization, "xpu"), "");
    const Quantization named = {.encoding = encoding, .dialect = "bnb-cpu", .nested_offset = {}};
    EXPECT_EQ(dialect(named, "cuda:1"), "bnb-cpu");
  }
  EXPECT_EQ(dialect({.encoding = "nvfp4", .dialect = {}, .nested_offset = {}}, "cuda:0"), "");
}

TEST(Quantize, OnDiskTheNumbersAreNotKept) {
  PlanOptions options;
  options.device_map.entries = {{"", "disk"}};
  options.offload_folder = "folder";
  const Plan plan = plan_of_one(nf4, {10, 13}, Dtype::bf16, options);
  EXPECT_EQ(plan.targets[0].delivery, Delivery::disk_write);
  EXPECT_EQ(plan.bytes_to_write, 65u + 12u);
  options.quantize.clear();
  const Plan plain = make_plan(fake_catalog({{"w", {10, 13}, Dtype::bf16}}),
                               skeleton_of({target_of("w", {10, 13}, Dtype::bf16)}), options);
  EXPECT_EQ(plain.targets[0].delivery, Delivery::disk_keep);  // control
}

struct Refused {
  Quantization quantization;
  Shape shape;
  Dtype dtype;
  std::string message;
};

TEST(Quantize, WhatDoesNotFitIsAFinding) {
  const std::vector<Refused> cases = {
      {{.encoding = "nf5", .dialect = {}, .nested_offset = {}},
       {4, 4},
       Dtype::f32,
       "unknown encoding"},
      {{.encoding = "nf4", .dialect = "x", .nested_offset = {}}, {4, 4}, Dtype::f32, "dialect"},
      {{.encoding = "nf4", .dialect = {}, .block_size = 48, .nested_offset = {}},
       {4, 4},
       Dtype::f32,
       "block size"},
      {{.encoding = "int8", .dialect = {}, .nested_offset = {}}, {4, 4, 4}, Dtype::f32, "matrices"},
      {{.encoding = "int8", .dialect = {}, .nested = true, .nested_offset = {}},
       {4, 4},
       Dtype::f32,
       "nested"},
      {{.encoding = "nf4", .dialect = {}, .nested_offset = 1.0f}, {4, 4}, Dtype::f32, "offset"},
      {nf4, {4, 4}, Dtype::f64, "F32, F16 and BF16"},
      {{.encoding = "mxfp4", .dialect = {}, .nested_offset = {}}, {4, 48}, Dtype::f32, "of 32"},
      {{.encoding = "int4", .dialect = {}, .nested_offset = {}}, {3, 64}, Dtype::f32, "of 128"},
      {{.encoding = "int4-awq", .dialect = {}, .nested_offset = {}}, {3, 128}, Dtype::f32, "128"},
      {{.encoding = "fp8-channel", .dialect = {}, .nested_offset = {}}, {64}, Dtype::f32, "matri"},
      {{.encoding = "nvfp4", .dialect = "modelopt-export", .nested_offset = {}},
       {4, 64},
       Dtype::f32,
       "dialect"},
      {{.encoding = "nvfp4", .dialect = {}, .nested = true, .nested_offset = {}},
       {4, 64},
       Dtype::f32,
       "nested"},
  };
  for (const Refused& refused : cases) {
    const Plan plan = plan_of_one(refused.quantization, refused.shape, refused.dtype);
    const auto findings = found(plan, "plan.quantize");
    ASSERT_EQ(findings.size(), 1u) << refused.message;
    EXPECT_THAT(findings[0].message, HasSubstr(refused.message));
    EXPECT_THAT(findings[0].message, HasSubstr("'w'"));
    EXPECT_FALSE(plan.targets[0].quantization);
  }
}

TEST(Quantize, TiesFillsAndNamesOfPartsAreRefused) {
  PlanOptions options;
  options.quantize = {{"w", nf4}};
  const auto findings_of = [&](const std::vector<Target>& targets) {
    return found(make_plan(fake_catalog({{"w", {4}}, {"w.absmax", {4}}}), skeleton_of(targets),
                           options),
                 "plan.quantize")
        .size();
  };
  EXPECT_EQ(findings_of({target_of("w", {4})}), 0u);  // control
  EXPECT_EQ(findings_of({target_of("w", {4}), tie_of("t", target_of("w", {4}))}), 1u);
  EXPECT_EQ(findings_of({target_of("w", {4}), target_of("w.absmax", {4})}), 1u);
  options.quantize = {{"x", nf4}};
  options.missing = MissingPolicy::zeros;
  EXPECT_EQ(findings_of({target_of("x", {4})}), 1u);
  EXPECT_EQ(code_of([&] { (void)findings_of({target_of("w", {4})}); }),
            "plan.options");  // no such target
}

TEST(Quantize, APlanFromTextIsTheSame) {
  for (const Quantization& quantization : {nf4, nested,
                                           Quantization{.encoding = "fp4",
                                           .dialect = "bnb-cuda",
                                           .block_size = 128,
                                           .nested = true,
                                           .nested_offset = 0.1f},
                                           Quantization{.encoding = "nvfp4",
                                           .dialect = "modelopt-compat",
                                           .nested_offset = {},
                                           .group = "gate and up"}}) {
    const Plan plan = plan_of_one(quantization);
    const Plan back = bind_plan(read_plan(to_json(plan)), plan.catalog);
    EXPECT_EQ(back.targets[0].quantization, quantization);
    EXPECT_EQ(to_json(back), to_json(plan));
  }
}

// Values of codes are decoded to F32, so that their encoder can find exact scales.
TEST(Quantize, DecodedCodesAreEncodedExactlyIfPossible) {
  struct Case {
    const char* encoding;
    const char* dialect;
    bool is_exact;
  };
  const std::vector<FakeTensor> codes = {{"w", {256, 256}, Dtype::f8_e4m3},
                                         {"w_scale", {256, 1}, Dtype::f32}};
  const std::vector<FakeTensor> floats = {{"w", {256, 256}, Dtype::bf16}};
  const Skeleton skeleton = skeleton_of({target_of("w", {256, 256}, Dtype::bf16)});
  for (const auto& [encoding, dialect, is_exact] : {Case{"fp8", "", true},
                                                    {"nvfp4", "exact", true},
                                                    {"q4_0", "", true},
                                                    {"q4_k", "", true},
                                                    {"nvfp4", "modelopt-compat", false},
                                                    {"fp8", "modelopt-export", false},
                                                    {"nf4", "", false}}) {
    PlanOptions options;
    options.quantize = {{"w", {.encoding = encoding, .dialect = dialect, .nested_offset = {}}}};
    const Plan plan = make_plan(fake_catalog(codes), skeleton, options);
    const PlannedTarget& target = plan.targets[0];
    ASSERT_TRUE(target.quantization) << to_table(plan);
    EXPECT_EQ(target.quantization->exact_first.value_or(false), is_exact) << encoding;
    EXPECT_EQ(target.dtype, is_exact ? Dtype::f32 : Dtype::bf16) << encoding;
    EXPECT_EQ(plan.decodings[target.recipe.boxes[0].decoding].dtype, target.dtype) << encoding;
    EXPECT_EQ(bind_plan(read_plan(to_json(plan)), plan.catalog).targets[0].quantization,
              target.quantization);
    const Plan plain = make_plan(fake_catalog(floats), skeleton, options);
    EXPECT_FALSE(plain.targets[0].quantization->exact_first.value_or(false)) << encoding;
    EXPECT_EQ(plain.targets[0].dtype, Dtype::bf16) << encoding;
  }
}

TEST(Quantize, SavedPlansSayThatTheyHoldNoImportance) {
  Quantization quantization = {.encoding = "q4_k", .dialect = {}, .nested_offset = {}};
  const auto saved = [&] { return to_json(plan_of_one(quantization, {4, 256})); };
  EXPECT_FALSE(error_of([&] { (void)read_plan(saved()); }));  // control
  quantization.importance = std::make_shared<const std::vector<float>>(256, 1.0f);
  const auto error = error_of([&] { (void)read_plan(saved()); });
  ASSERT_TRUE(error);
  EXPECT_THAT(error->what(), HasSubstr("does not contain an importance"));
}

// The plan rejects a group whose stacks differ in height before any read.
TEST(Quantize, StacksOfAGroupAreOfOneHeight) {
  const auto codes = [](const Shape& second) {
    const Quantization quantization = {
        .encoding = "fp8", .dialect = {}, .nested_offset = {}, .group = "g"};
    const Shape first = {128, 256};
    PlanOptions options;
    options.quantize = {{"a", quantization}, {"b", quantization}};
    std::vector<std::string> found;
    const Plan plan = make_plan(
        fake_catalog({{"a", first, Dtype::bf16}, {"b", second, Dtype::bf16}}),
        skeleton_of({target_of("a", first, Dtype::bf16), target_of("b", second, Dtype::bf16)}),
        options);
    for (const Finding& finding : plan.findings) found.push_back(finding.code);
    return found;
  };
  EXPECT_THAT(codes({2, 128, 256}), ElementsAre("plan.quantize"));
  EXPECT_THAT(codes({64, 256}), IsEmpty());  // control
}

TEST(Quantize, APlanFromTextIsNotBelieved) {
  const Plan plan = plan_of_one(nested);
  const auto code_with = [&](const std::string& from, const std::string& to) {
    std::string text = to_json(plan);
    const auto at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    return code_of([&] { (void)bind_plan(read_plan(text), plan.catalog); });
  };
  EXPECT_EQ(code_with("\"nf4\"", "\"q99\""), "plan.json");
  EXPECT_EQ(code_with("\"block_size\": 64", "\"block_size\": 65"), "plan.json");
  EXPECT_EQ(code_with("\"nested\": true", "\"nested\": false"), "plan.json");  // different size
}

}  // namespace
}  // namespace loadstone::test
