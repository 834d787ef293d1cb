// Tests constants in recipe builders, plans and JSON.
#include <gmock/gmock.h>

#include <cstring>

#include "base/base64.h"
#include "loadstone/error.h"
#include "loadstone/plan.h"
#include "loadstone/recipe_builder.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/memory_storage.h"
#include "support/plans.h"

namespace loadstone::test {
namespace {

using ::testing::HasSubstr;

using Bytes = std::vector<std::byte>;
using Value = RecipeBuilder::Value;

Bytes bytes_of(const std::vector<float>& values) {
  Bytes bytes(values.size() * sizeof(float));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

const Bytes numbers = bytes_of({1.0f, -2.5f, 3.0e-5f, 65504.0f});

class Constants : public testing::Test {
 protected:
  Constants() {
    storage_.add_file("/m.safetensors", safetensors_bytes({{"w", "F32", {4}, some_bytes(16)}}));
    options_.storage = &storage_;
    catalog_ = open_checkpoint("/m.safetensors", options_);
  }

  Recipes recipes() {
    RecipeBuilder builder(catalog_);
    builder.add("c", builder.constant(numbers, {2, 2}, Dtype::f32));
    builder.add("w", builder.source("w"));
    builder.add("none", builder.constant({}, {0, 3}, Dtype::i64));
    return builder.finish();
  }

  Plan plan(Dtype dtype = Dtype::f32, const PlanOptions& more = {}) {
    PlanOptions options = more;
    options.recipes = recipes();
    return make_plan(catalog_,
                     skeleton_of({target_of("c", {2, 2}, dtype), target_of("w", {4}),
                                  target_of("none", {0, 3}, Dtype::i64)}),
                     options);
  }

  MemoryStorage storage_;
  OpenOptions options_;
  std::shared_ptr<const Catalog> catalog_;
};

TEST_F(Constants, AreTargetsAsTheyAre) {
  const Plan made = plan();
  EXPECT_TRUE(made.findings.empty());
  const PlannedTarget& c = planned(made, "c");
  EXPECT_EQ(c.recipe.origin, Origin::constant);
  EXPECT_EQ(c.delivery, Delivery::memory);
  ASSERT_NE(c.recipe.constant, nullptr);
  EXPECT_EQ(*c.recipe.constant, numbers);
  EXPECT_EQ(made.bytes_to_read, 16u);
  EXPECT_EQ(made.peak_bytes.at("cpu"), 32u);
  EXPECT_THAT(to_table(made), HasSubstr("constant"));
}

TEST_F(Constants, AreCastToTheTarget) {
  const Plan half = plan(Dtype::bf16);
  EXPECT_EQ(planned(half, "c").recipe.constant->size(), 8u);
  EXPECT_EQ((*planned(half, "c").recipe.constant)[1], std::byte{0x3f});  // 1.0 is 0x3f80
  const Plan wrong = plan(Dtype::i32);
  ASSERT_EQ(found(wrong, "plan.dtype").size(), 1u);
  EXPECT_EQ(found(wrong, "plan.dtype")[0].target, "c");
  EXPECT_EQ(planned(wrong, "c").recipe.constant, nullptr);
}

TEST_F(Constants, AreWrittenToDiskAndLeftOnMeta) {
  PlanOptions options;
  options.device_map.entries = {{"", "disk"}};
  options.offload_folder = "/tmp/offload";
  EXPECT_EQ(planned(plan(Dtype::f32, options), "c").delivery, Delivery::disk_write);
  options.device_map.entries = {{"", "meta"}};
  const PlannedTarget left = planned(plan(Dtype::f32, options), "c");
  EXPECT_EQ(left.recipe.origin, Origin::excluded);
  EXPECT_EQ(left.recipe.constant, nullptr);
}

TEST_F(Constants, OperationsOnThemAreRefused) {
  RecipeBuilder builder(catalog_);
  const Value c = builder.constant(numbers, {4}, Dtype::f32);
  const Value w = builder.source("w");
  EXPECT_EQ(builder.shape(c), Shape({4}));
  EXPECT_EQ(builder.dtype(c), Dtype::f32);
  EXPECT_EQ(builder.cast(c, Dtype::f32), c);
  const auto refused = [](auto work) {
    const auto error = error_of(work);
    return error && error->code() == "plan.recipe" &&
           std::string(error->what()).find("constant") != std::string::npos;
  };
  EXPECT_TRUE(refused([&] { (void)builder.concat({w, c}, 0); }));
  EXPECT_TRUE(refused([&] { (void)builder.stack({c, w}, 0); }));
  EXPECT_TRUE(refused([&] { (void)builder.reshape(c, {2, 2}); }));
  EXPECT_TRUE(refused([&] { (void)builder.slice(c, 0, 1, 2, 2); }));
  EXPECT_TRUE(refused([&] { (void)builder.cast(c, Dtype::bf16); }));
  EXPECT_TRUE(refused([&] { (void)builder.constant(numbers, {5}, Dtype::f32); }));
  EXPECT_TRUE(refused([&] { (void)builder.constant(numbers, {UINT64_MAX, 2}, Dtype::f32); }));
  const Bytes half(constant_bytes_max / 2);
  (void)builder.constant(half, {half.size()}, Dtype::u8);
  EXPECT_TRUE(refused([&] { (void)builder.constant(half, {half.size()}, Dtype::u8); }));
}

TEST_F(Constants, RecipesThatSomebodyElseFilledInAreChecked) {
  PlanOptions options;
  const Skeleton skeleton = skeleton_of({target_of("c", {4})});
  const auto with = [&](std::vector<Box> boxes, const Bytes& bytes) {
    options.recipes.targets = {
        {"c", {4}, Dtype::f32, std::move(boxes), std::make_shared<const Bytes>(bytes)}};
  };
  with({{0, 0, 0, {{4, 1, 1}}}}, numbers);
  EXPECT_EQ(code_of([&] { (void)make_plan(catalog_, skeleton, options); }), "plan.recipe");
  with({}, Bytes(constant_bytes_max + 1));
  EXPECT_EQ(code_of([&] { (void)make_plan(catalog_, skeleton, options); }), "plan.recipe");
  with({}, Bytes(15));
  EXPECT_EQ(found(make_plan(catalog_, skeleton, options), "plan.recipe").size(), 1u);
  with({}, numbers);
  EXPECT_TRUE(make_plan(catalog_, skeleton, options).ok());
}

// ---- as JSON

std::string changed(std::string text, std::string_view from, std::string_view to) {
  const auto at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

TEST_F(Constants, RecipesComeBackAsTheyWere) {
  const std::string text = to_json(recipes(), *catalog_);
  const Recipes again = recipes_from_json(*catalog_, text);
  ASSERT_EQ(again.targets.size(), 3u);
  EXPECT_EQ(*again.targets[0].constant, numbers);
  EXPECT_EQ(again.targets[1].constant, nullptr);
  EXPECT_TRUE(again.targets[2].constant->empty());
  EXPECT_EQ(to_json(again, *catalog_), text);
  const std::string held = base64_from(numbers);
  for (const std::string& other : {std::string("Zg"), std::string("Zg=="), held + "AAAA"}) {
    const std::string bad = changed(text, held, other);
    EXPECT_EQ(code_of([&] { (void)recipes_from_json(*catalog_, bad); }), "plan.recipe") << other;
  }
}

TEST_F(Constants, PlansComeBackAsTheyWere) {
  const Plan made = plan();
  const std::string text = to_json(made);
  const Plan again = plan_from_json(text, options_);
  EXPECT_EQ(*planned(again, "c").recipe.constant, numbers);
  EXPECT_TRUE(planned(again, "none").recipe.constant->empty());
  EXPECT_EQ(to_json(again), text);
  const std::string held = "\"constant\": \"" + base64_from(numbers) + "\"";
  const auto code = [&](const std::string& from, const std::string& to) {
    const std::string bad = changed(text, from, to);
    return code_of([&] { (void)plan_from_json(bad, options_); });
  };
  EXPECT_EQ(code(held, "\"constant\": \"Zg\""), "plan.json");
  EXPECT_EQ(code(held, "\"constant\": \"Zg==\""), "plan.json");
  EXPECT_EQ(code(held, "\"constant\": 7"), "plan.json");
  EXPECT_EQ(code(held, ""), "plan.json");
  EXPECT_EQ(code(held, held + ", \"boxes\": [{\"source\": 0, \"source_offset\": 0, "
                              "\"target_offset\": 0, \"dims\": [[4, 1, 1]]}]"),
            "plan.json");
  EXPECT_EQ(code("\"origin\": \"constant\"", "\"origin\": \"zeros\""), "plan.json");
  EXPECT_EQ(code("\"origin\": \"checkpoint\"", "\"origin\": \"constant\""), "plan.json");
  EXPECT_EQ(code("\"delivery\": \"memory\"", "\"delivery\": \"none\""), "plan.json");
}

}  // namespace
}  // namespace loadstone::test
