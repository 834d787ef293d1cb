// Codes of quantized tensors and targets that want numbers.
#include "plan/codes.h"

#include <gmock/gmock.h>

#include "loadstone/plan.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/memory_storage.h"
#include "support/plans.h"

namespace loadstone::test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct NamingCase {
  const char* title;
  std::vector<FakeTensor> tensors;  // the data first
  Shape numbers;
};

std::vector<NamingCase> namings() {
  return {
      {"per tensor",
       {{"a.weight", {4, 8}, Dtype::f8_e4m3}, {"a.weight_scale", {}, Dtype::f32}},
       {4, 8}},
      {"DeepSeek",
       {{"a.weight", {4, 8}, Dtype::f8_e4m3}, {"a.weight_scale_inv", {1, 1}, Dtype::f32}},
       {4, 8}},
      {"vector", {{"a.weight", {8}, Dtype::f8_e5m2}, {"a.weight_scale", {}, Dtype::f32}}, {8}},
      {"stack",
       {{"a.up", {2, 4, 8}, Dtype::f8_e4m3}, {"a.up_weight_scale", {2}, Dtype::f32}},
       {2, 4, 8}},
      {"Comfy", {{"a.weight", {4, 8}, Dtype::f8_e4m3}, {"a.scale_weight", {}, Dtype::f32}}, {4, 8}},
      {"inference code of DeepSeek",
       {{"a.weight", {4, 8}, Dtype::f8_e4m3}, {"a.scale", {1, 1}, Dtype::f32}},
       {4, 8}},
      {"rows", {{"a.weight", {4, 8}, Dtype::i8}, {"a.weight_scale", {4}, Dtype::f32}}, {4, 8}},
      {"bitsandbytes", {{"a.weight", {4, 8}, Dtype::i8}, {"a.SCB", {4}, Dtype::f32}}, {4, 8}},
      {"NVFP4",
       {{"a.weight", {4, 8}, Dtype::u8},
        {"a.weight_scale", {4, 1}, Dtype::f8_e4m3},
        {"a.weight_scale_2", {}, Dtype::f32}},
       {4, 16}},
  };
}

Skeleton numbers_of(const NamingCase& naming, Dtype dtype = Dtype::bf16) {
  return skeleton_of({target_of(naming.tensors[0].name, naming.numbers, dtype)});
}

TEST(Codes, AreNotCastToNumbers) {
  for (const NamingCase& naming : namings()) {
    const Plan plan = make_plan(fake_catalog(naming.tensors), numbers_of(naming));
    const auto findings = found(plan, "plan.encoding");
    ASSERT_EQ(findings.size(), 1u) << naming.title;
    EXPECT_EQ(findings[0].severity, Severity::error);
    EXPECT_EQ(findings[0].target, naming.tensors[0].name);
    EXPECT_THAT(findings[0].message, HasSubstr(naming.tensors[1].name)) << naming.title;
    EXPECT_THAT(findings[0].suggestion, HasSubstr("--dequantize"));
    EXPECT_EQ(plan.targets[0].recipe.origin, Origin::exception);
    // Their scales are named there, and not again.
    EXPECT_THAT(found(plan, "plan.unexpected"), IsEmpty()) << naming.title;
  }
}

TEST(Codes, AreNotNumbersInTheirOwnDtypeEither) {
  const NamingCase naming = namings()[0];
  const auto refused = [&](const Skeleton& skeleton, const PlanOptions& options) {
    return found(make_plan(fake_catalog(naming.tensors), skeleton, options), "plan.encoding");
  };
  EXPECT_EQ(refused(numbers_of(naming), {.dtype_from_file = true}).size(), 1u);
  EXPECT_EQ(refused(numbers_of(naming), {.dtype = Dtype::f8_e4m3}).size(), 1u);
  const auto alone = refused(numbers_of(naming, Dtype::f8_e4m3), {});
  ASSERT_EQ(alone.size(), 1u);
  EXPECT_THAT(alone[0].message, HasSubstr("nothing takes 'a.weight_scale'"));
  EXPECT_THAT(refused(numbers_of(naming, Dtype::f8_e4m3), {.known_sources = {"a.weight_scale"}}),
              IsEmpty());
}

TEST(Codes, LoadWithTheirScalesIntoModulesMadeForThem) {
  for (const NamingCase& naming : namings()) {
    std::vector<Target> targets;
    for (const FakeTensor& tensor : naming.tensors) {
      targets.push_back(target_of(tensor.name, tensor.shape, tensor.encoding.dtype()));
    }
    // A dtype that is asked for is that of numbers: the codes keep theirs.
    for (const bool is_cast : {false, true}) {
      PlanOptions options;
      if (is_cast) options.dtype = Dtype::bf16;
      const Plan plan = make_plan(fake_catalog(naming.tensors), skeleton_of(targets), options);
      EXPECT_TRUE(plan.ok()) << naming.title;
      EXPECT_EQ(plan.targets[0].dtype, naming.tensors[0].encoding.dtype());
    }
  }
}

TEST(Codes, RulesAndRecipesDoNotCastThemEither) {
  const auto catalog = fake_catalog({{"e.0.w", {4, 8}, Dtype::f8_e4m3},
                                     {"e.0.w_scale", {}, Dtype::f32},
                                     {"e.1.w", {4, 8}, Dtype::f8_e4m3},
                                     {"e.1.w_scale", {}, Dtype::f32}});
  const Skeleton skeleton = skeleton_of({target_of("experts", {2, 4, 8}, Dtype::f32)});
  PlanOptions options;
  options.rules = rules_from_json(
      R"j([{"op": "stack", "sources": ["e\\.(\\d+)\\.w"], "targets": ["experts"], "dim": 0}])j");
  EXPECT_EQ(found(make_plan(catalog, skeleton, options), "plan.encoding").size(), 1u);

  TargetRecipe recipe = {.target = "experts", .shape = {2, 4, 8}, .dtype = Dtype::f32};
  for (const std::uint32_t expert : {0u, 1u}) {
    recipe.boxes.push_back(
        {.source = 2 * expert, .target_offset = std::uint64_t{32} * expert, .dims = {{32, 1, 1}}});
  }
  EXPECT_EQ(
      found(make_plan(catalog, skeleton, {.recipes = {{recipe}, {}}}), "plan.encoding").size(), 1u);
  // Decoded, they are numbers.
  Recipes decoded = {{recipe}, {}};
  for (const std::uint32_t expert : {0u, 1u}) {
    decoded.decodings.push_back({"fp8_block", {2 * expert, 2 * expert + 1}, {4, 8}, Dtype::f32});
    decoded.targets[0].boxes[expert].decoding = expert;
  }
  EXPECT_TRUE(make_plan(catalog, skeleton, {.recipes = decoded}).ok());
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
  // A plan that takes `name` as the numbers that they are not.
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
  EXPECT_EQ(error->code(), "plan.encoding");
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
