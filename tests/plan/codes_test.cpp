// Tests plans for quantized tensors whose targets want decoded values.
#include "plan/codes.h"

#include <gmock/gmock.h>

#include "loadstone/plan.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/memory_storage.h"
#include "support/plans.h"

namespace loadstone::test {
namespace {

using namespace ::testing;

struct NamingCase {
  const char* title;
  const char* kernel;               // empty if no codec reads the layout
  std::vector<FakeTensor> tensors;  // the data is the first tensor
  Shape numbers;
};

std::vector<NamingCase> namings() {
  return {
      {"per tensor",
       "fp8_block",
       {{"a.weight", {4, 8}, Dtype::f8_e4m3}, {"a.weight_scale", {}, Dtype::f32}},
       {4, 8}},
      {"DeepSeek",
       "fp8_block_128",
       {{"a.weight", {4, 8}, Dtype::f8_e4m3}, {"a.weight_scale_inv", {1, 1}, Dtype::f32}},
       {4, 8}},
      {"vector", "", {{"a.weight", {8}, Dtype::f8_e5m2}, {"a.weight_scale", {}, Dtype::f32}}, {8}},
      {"stack",
       "fp8_block",
       {{"a.up", {2, 4, 8}, Dtype::f8_e4m3}, {"a.up_weight_scale", {2}, Dtype::f32}},
       {2, 4, 8}},
      {"Comfy",
       "fp8_block",
       {{"a.weight", {4, 8}, Dtype::f8_e4m3}, {"a.scale_weight", {}, Dtype::f32}},
       {4, 8}},
      {"inference code of DeepSeek",
       "",
       {{"a.weight", {4, 8}, Dtype::f8_e4m3}, {"a.scale", {1, 1}, Dtype::f32}},
       {4, 8}},
      {"rows",
       "int8_rows",
       {{"a.weight", {4, 8}, Dtype::i8}, {"a.weight_scale", {4}, Dtype::f32}},
       {4, 8}},
      {"bitsandbytes",
       "bnb_int8",
       {{"a.weight", {4, 8}, Dtype::i8}, {"a.SCB", {4}, Dtype::f32}},
       {4, 8}},
      {"NVFP4",
       "nvfp4",
       {{"a.weight", {4, 8}, Dtype::u8},
        {"a.weight_scale", {4, 1}, Dtype::f8_e4m3},
        {"a.weight_scale_2", {}, Dtype::f32}},
       {4, 16}},
  };
}

Skeleton numbers_of(const NamingCase& naming, Dtype dtype = Dtype::bf16) {
  return skeleton_of({target_of(naming.tensors[0].name, naming.numbers, dtype)});
}

TEST(Codes, AreDecodedWhereNumbersAreWanted) {
  for (const NamingCase& naming : namings()) {
    const Plan plan = make_plan(fake_catalog(naming.tensors), numbers_of(naming));
    const bool is_read = *naming.kernel != '\0';
    ASSERT_EQ(plan.ok(), is_read) << naming.title << to_table(plan);
    if (is_read) {
      ASSERT_EQ(plan.decodings.size(), 1u) << naming.title;
      EXPECT_EQ(plan.decodings[0].kernel, naming.kernel);
      EXPECT_EQ(plan.decodings[0].dtype, Dtype::bf16);
      EXPECT_EQ(plan.targets[0].recipe.boxes[0].decoding, 0u);
    } else {
      EXPECT_EQ(plan.findings[0].target, naming.tensors[0].name);
      EXPECT_THAT(plan.findings[0].sources, Contains(naming.tensors[1].name)) << naming.title;
      EXPECT_EQ(plan.targets[0].recipe.origin, Origin::excluded);
    }
    // The scales are used by the decoding or named by the finding, so loadstone does not report
    // them as unexpected.
    EXPECT_THAT(found(plan, "plan.unexpected"), IsEmpty()) << naming.title;
  }
}

// A target that is to get values must not take the dtype of the codes.
TEST(Codes, HaveNoDtypeOfNumbers) {
  const NamingCase naming = namings()[0];
  const auto dtype_with = [&](const PlanOptions& options) {
    const Plan plan = make_plan(fake_catalog(naming.tensors), numbers_of(naming), options);
    EXPECT_TRUE(plan.ok()) << to_table(plan);
    return std::pair(plan.targets[0].dtype, plan.decodings.at(0).dtype);
  };
  EXPECT_EQ(dtype_with({.dtype_from_file = true}), std::pair(Dtype::bf16, Dtype::bf16));
  EXPECT_EQ(dtype_with({.dtype = Dtype::f16}), std::pair(Dtype::f16, Dtype::f16));
  EXPECT_EQ(dtype_with({.dtype = Dtype::f64}), std::pair(Dtype::f64, Dtype::f32));
}

TEST(Codes, AreNeitherComponentNorNumbersHalfway) {
  const NamingCase fp8 = namings()[0];
  const auto refused = [](const NamingCase& naming, const Skeleton& skeleton,
                          const PlanOptions& options = {}) {
    const auto findings =
        found(make_plan(fake_catalog(naming.tensors), skeleton, options), "plan.component");
    return findings.empty() ? std::string() : findings[0].message;
  };
  // No target takes the scale of the codes.
  const Skeleton alone = numbers_of(fp8, Dtype::f8_e4m3);
  EXPECT_THAT(refused(fp8, alone), HasSubstr("no target gets 'a.weight_scale'"));
  EXPECT_THAT(refused(fp8, alone, {.caller = {.known_sources = {"a.weight_scale"}}}), IsEmpty());
  // The codes are decoded, and a target takes their scale too.
  const Skeleton both = skeleton_of(
      {target_of("a.weight", {4, 8}, Dtype::bf16), target_of("a.weight_scale", {}, Dtype::f32)});
  EXPECT_THAT(refused(fp8, both), HasSubstr("gets its 'a.weight_scale'"));
  // Integers that are not quantized.
  EXPECT_THAT(refused(namings()[6], numbers_of(namings()[6], Dtype::i32)), HasSubstr("I32"));
}

TEST(Codes, LoadWithTheirScalesIntoModulesMadeForThem) {
  for (const NamingCase& naming : namings()) {
    std::vector<Target> targets;
    for (const FakeTensor& tensor : naming.tensors) {
      targets.push_back(target_of(tensor.name, tensor.shape, tensor.encoding.dtype()));
    }
    // A requested dtype applies to plain values only. Codes keep their dtype.
    for (const bool is_cast : {false, true}) {
      PlanOptions options;
      if (is_cast) options.dtype = Dtype::bf16;
      const Plan plan = make_plan(fake_catalog(naming.tensors), skeleton_of(targets), options);
      EXPECT_TRUE(plan.ok()) << naming.title;
      EXPECT_EQ(plan.targets[0].dtype, naming.tensors[0].encoding.dtype());
    }
  }
}

TEST(Codes, AreDecodedForRulesAndRecipes) {
  const auto catalog = fake_catalog({{"e.0.w", {4, 8}, Dtype::f8_e4m3},
                                     {"e.0.w_scale", {}, Dtype::f32},
                                     {"e.1.w", {4, 8}, Dtype::f8_e4m3},
                                     {"e.1.w_scale", {}, Dtype::f32}});
  const Skeleton skeleton = skeleton_of({target_of("experts", {2, 4, 8}, Dtype::f32)});
  PlanOptions options;
  options.rules = rules_from_json(
      R"j([{"op": "stack", "sources": ["e\\.(\\d+)\\.w"], "targets": ["experts"], "dim": 0}])j");
  const auto decodings_of = [&](const PlanOptions& with) {
    const Plan plan = make_plan(catalog, skeleton, with);
    EXPECT_TRUE(plan.ok()) << to_table(plan);
    std::vector<std::uint32_t> sources;
    for (const Box& box : plan.targets[0].recipe.boxes) {
      for (const std::uint32_t source : plan.decodings.at(box.decoding).sources) {
        sources.push_back(source);
      }
    }
    return sources;
  };
  EXPECT_THAT(decodings_of(options), ElementsAre(0, 1, 2, 3));

  TargetRecipe recipe = {.target = "experts", .shape = {2, 4, 8}, .dtype = Dtype::f32};
  for (const std::uint32_t expert : {0u, 1u}) {
    recipe.boxes.push_back(
        {.source = 2 * expert, .target_offset = std::uint64_t{32} * expert, .dims = {{32, 1, 1}}});
  }
  EXPECT_THAT(decodings_of({.recipes = {{recipe}, {}}}), ElementsAre(0, 1, 2, 3));
  Recipes decoded = {{recipe}, {}};
  for (const std::uint32_t expert : {0u, 1u}) {
    decoded.decodings.push_back({"fp8_block", {2 * expert, 2 * expert + 1}, {4, 8}, Dtype::f32});
    decoded.targets[0].boxes[expert].decoding = expert;
  }
  EXPECT_THAT(decodings_of({.recipes = decoded}), ElementsAre(0, 1, 2, 3));
}

TEST(Codes, Fp8WithoutScalesAreNumbers) {
  const auto catalog = fake_catalog({{"a.weight", {4, 8}, Dtype::f8_e4m3}});
  const Plan plan = make_plan(catalog, skeleton_of({target_of("a.weight", {4, 8}, Dtype::bf16)}));
  EXPECT_TRUE(plan.ok());
}

class SavedCodes : public testing::Test {
 protected:
  std::shared_ptr<const Catalog> open(const std::string& config = "") {
    storage_.add_file("/m/model.safetensors",
                      safetensors_bytes({{"a.weight", "F8_E4M3", {4, 8}, some_bytes(32)},
                                         {"a.weight_scale", "F32", {}, raw(0.5f)},
                                         {"b.weight", "F8_E4M3", {4, 8}, some_bytes(32)}}));
    if (!config.empty()) storage_.add_file("/m/config.json", config);
    return open_checkpoint(std::string("/m"), options_);
  }
  // Returns a forged plan, in which a target takes the codes of `name` as plain values.
  std::string forged(const std::shared_ptr<const Catalog>& catalog, const std::string& name) {
    Plan plan = make_plan(fake_catalog({{"b.weight", {4, 8}, Dtype::f8_e4m3}}),
                          skeleton_of({target_of("b.weight", {4, 8}, Dtype::bf16)}));
    plan.catalog = catalog;
    plan.targets[0].recipe.boxes[0].source = *catalog->find(name);
    return to_json(plan);
  }

  MemoryStorage storage_;
  OpenOptions options_ = {.storage = &storage_};
};

TEST_F(SavedCodes, APlanFromAFileDoesNotCastThemEither) {
  const auto catalog = open();
  EXPECT_NO_THROW(static_cast<void>(plan_from_json(forged(catalog, "b.weight"), options_)));
  const auto error =
      error_of([&] { static_cast<void>(plan_from_json(forged(catalog, "a.weight"), options_)); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), "plan.component");
  EXPECT_THAT(error->message(), HasSubstr("a.weight_scale"));
}

TEST_F(SavedCodes, ScalesThatAConfigPromisesAndTheCheckpointLacksAreNamed) {
  const auto catalog = open(R"({"quantization_config": {"quant_method": "fp8"}})");
  const auto error =
      error_of([&] { static_cast<void>(plan_from_json(forged(catalog, "b.weight"), options_)); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), "q.scale_missing");
  const Plan plan = make_plan(catalog, skeleton_of({target_of("b.weight", {4, 8}, Dtype::bf16)}));
  EXPECT_THAT(plan.findings, Contains(AllOf(Field(&Finding::code, "q.scale_missing"),
                                            Field(&Finding::target, "b.weight"))));
}

}  // namespace
}  // namespace loadstone::test
