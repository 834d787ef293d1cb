// Tests decodings in recipe builders, plans and JSON.
#include "boxes/decodings.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>

#include "loadstone/error.h"
#include "loadstone/page.h"
#include "loadstone/plan.h"
#include "loadstone/recipe_builder.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/memory_storage.h"
#include "support/plans.h"

namespace loadstone::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Value = RecipeBuilder::Value;

// A checkpoint with two FP8 experts and their scales, a plain tensor, and one MXFP4 tensor.
class Decodings : public testing::Test {
 protected:
  Decodings() {
    const auto tensor = [](const std::string& name, const char* dtype,
                           std::vector<std::uint64_t> shape, std::size_t bytes) {
      return FileTensor{name, dtype, std::move(shape), some_bytes(bytes)};
    };
    storage_.add_file("/m.safetensors", safetensors_bytes({
                                            tensor("0.s", "F32", {2, 1}, 8),
                                            tensor("0.w", "F8_E4M3", {4, 6}, 24),
                                            tensor("1.s", "F32", {2, 1}, 8),
                                            tensor("1.w", "F8_E4M3", {4, 6}, 24),
                                            tensor("plain", "BF16", {4, 6}, 48),
                                            tensor("blocks", "U8", {3, 2, 16}, 96),
                                            tensor("exponents", "U8", {3, 2}, 6),
                                        }));
    options_.storage = &storage_;
    catalog_ = open_checkpoint("/m.safetensors", options_);
    skeleton_ = skeleton_of({target_of("experts", {2, 6, 4}), target_of("mixed", {8, 6}),
                             target_of("packed", {3, 64}, Dtype::bf16)});
  }

  static Value weight(RecipeBuilder& builder, int expert) {
    return builder.decode(
        "fp8_block",
        {builder.source(fmt::format("{}.w", expert)), builder.source(fmt::format("{}.s", expert))},
        {4, 6}, Dtype::bf16);
  }

  Recipes recipes() {
    RecipeBuilder builder(catalog_);
    const Value first = weight(builder, 0);
    const Value second = weight(builder, 1);
    builder.add("experts", builder.cast(builder.transpose(builder.stack({first, second}, 0), 1, 2),
                                        Dtype::f32));
    builder.add("mixed", builder.concat({builder.source("plain"), first}, 0));
    builder.add("packed",
                builder.decode("mxfp4", {builder.source("blocks"), builder.source("exponents")},
                               {3, 64}, Dtype::bf16));
    return builder.finish();
  }

  Plan plan() {
    PlanOptions options;
    options.recipes = recipes();
    return make_plan(catalog_, skeleton_, options);
  }

  MemoryStorage storage_;
  OpenOptions options_;
  std::shared_ptr<const Catalog> catalog_;
  Skeleton skeleton_;
};

TEST_F(Decodings, AreValuesLikeOthers) {
  const Recipes made = recipes();
  ASSERT_EQ(made.decodings.size(), 3u);
  EXPECT_EQ(made.decodings[1], (Decoding{"fp8_block", {3, 2}, {4, 6}, Dtype::bf16}));
  const auto& experts = made.targets[0].boxes;
  ASSERT_EQ(experts.size(), 2u);
  EXPECT_EQ(experts[1].decoding, 1u);
  EXPECT_EQ(experts[1].source, 3u);
  EXPECT_EQ(experts[1].target_offset, 24u);
  EXPECT_EQ(made.targets[1].boxes[0].decoding, no_decoding);
  EXPECT_EQ(made.targets[1].boxes[1].decoding, 0u);
  EXPECT_THAT(sources_of(made.targets[1].boxes, made.decodings), ElementsAre(4, 1, 0));
}

TEST_F(Decodings, MisusesAreRefused) {
  RecipeBuilder builder(catalog_);
  const Value w = builder.source("0.w");
  const Value s = builder.source("0.s");
  const auto decode = [&](const char* kernel, const std::vector<Value>& sources, const Shape& shape,
                          Dtype dtype = Dtype::bf16) {
    const auto error = error_of([&] { (void)builder.decode(kernel, sources, shape, dtype); });
    EXPECT_TRUE(error.has_value());
    EXPECT_EQ(error ? error->code() : "", "plan.recipe");
    return std::string(error ? error->what() : "");
  };
  EXPECT_THAT(decode("fp9_block", {w, s}, {4, 6}), HasSubstr("no decoder has this name"));
  EXPECT_THAT(decode("fp8_block", {w}, {4, 6}), HasSubstr("2 tensors"));
  EXPECT_THAT(decode("fp8_block", {s, w}, {4, 6}), HasSubstr("F32"));
  EXPECT_THAT(decode("fp8_block", {w, s}, {6, 4}), HasSubstr("[4, 6]"));
  EXPECT_THAT(decode("fp8_block", {w, builder.source("exponents")}, {4, 6}), HasSubstr("[3, 2]"));
  EXPECT_THAT(decode("fp8_block", {w, s}, {4, 6}, Dtype::i32), HasSubstr("I32"));
  EXPECT_THAT(decode("fp8_block", {builder.transpose(w, 0, 1), s}, {6, 4}), HasSubstr("a source"));
  EXPECT_THAT(decode("fp8_block", {w, builder.cast(s, Dtype::f16)}, {4, 6}), HasSubstr("a source"));
  EXPECT_THAT(decode("fp8_block", {w, 99}, {4, 6}), HasSubstr("no value has this number"));
  EXPECT_THAT(decode("fp8_block", {weight(builder, 0), s}, {4, 6}), HasSubstr("a source"));
}

TEST_F(Decodings, APlanCountsAndNamesAllSources) {
  const Plan made = plan();
  EXPECT_TRUE(made.ok());
  // The decodings use the weights and the scales, so no source is unexpected. The only cast is from
  // BF16 to F32.
  ASSERT_EQ(made.findings.size(), 1u);
  EXPECT_EQ(made.findings[0].code, "plan.cast");
  EXPECT_EQ(made.bytes_to_read, 2u * (8 + 24) + 48 + 96 + 6);
  EXPECT_EQ(planned(made, "packed").delivery, Delivery::memory);
  EXPECT_THAT(to_table(made), HasSubstr("F8_E4M3 by fp8_block"));
  EXPECT_THAT(to_html(made), HasSubstr("U8 by mxfp4"));
}

TEST_F(Decodings, OnDiskTheyAreWritten) {
  PlanOptions options;
  options.recipes = recipes();
  options.device_map.entries = {{"", "disk"}};
  options.offload_folder = "/tmp/offload";
  const Plan made = make_plan(catalog_, skeleton_, options);
  EXPECT_EQ(planned(made, "packed").delivery, Delivery::disk_write);
  EXPECT_EQ(made.bytes_to_write, 2u * 24 * 4 + 48 * 4 + 192 * 2);
}

TEST_F(Decodings, RecipesThatSomebodyElseFilledInAreChecked) {
  PlanOptions options;
  options.recipes = recipes();
  options.recipes.decodings[1].sources[1] = 5;
  EXPECT_EQ(code_of([&] { (void)make_plan(catalog_, skeleton_, options); }), "plan.recipe");
  options.recipes = recipes();
  options.recipes.targets[2].boxes[0].decoding = 3;
  const Plan nowhere = make_plan(catalog_, skeleton_, options);
  ASSERT_EQ(found(nowhere, "plan.box").size(), 1u);
  options.recipes = recipes();
  options.recipes.targets[2].boxes[0].source_offset = 1;
  EXPECT_EQ(found(make_plan(catalog_, skeleton_, options), "plan.box").size(), 1u);
}

TEST_F(Decodings, KernelsRoundToWhatIsWanted) {
  const auto catalog = fake_catalog({{"a", {2, 256}, BlockFormat::q4_k},
                                     {"b", {2, 256}, BlockFormat::q4_k},
                                     {"c", {256}, BlockFormat::q4_k}});
  RecipeBuilder builder(catalog);
  const auto numbers = [&](const char* name, const Shape& shape) {
    return builder.decode("gguf", {builder.source(name)}, shape, Dtype::f32);
  };
  const Value a = numbers("a", {2, 256});
  const Value b = numbers("b", {2, 256});
  builder.add("a0", builder.cast(builder.slice(a, 0, 0, 1), Dtype::bf16));
  builder.add("a1", builder.cast(builder.slice(a, 0, 1, 1), Dtype::bf16));
  builder.add("b0", builder.cast(builder.slice(b, 0, 0, 1), Dtype::f16));
  builder.add("b1", builder.slice(b, 0, 1, 1));
  builder.add("c", numbers("c", {256}));  // the model's dtype is narrower than the recipe's
  PlanOptions options;
  options.recipes = builder.finish();
  const Plan made = make_plan(
      catalog,
      skeleton_of({target_of("a0", {1, 256}, Dtype::bf16), target_of("a1", {1, 256}, Dtype::bf16),
                   target_of("b0", {1, 256}, Dtype::f16), target_of("b1", {1, 256}),
                   target_of("c", {256}, Dtype::bf16)}),
      options);
  EXPECT_TRUE(made.findings.empty());  // no finding reports a cast
  const auto index = [&](const char* name) { return planned(made, name).recipe.boxes[0].decoding; };
  const auto dtype = [&](const char* name) { return made.decodings.at(index(name)).dtype; };
  EXPECT_EQ(index("a0"), index("a1"));
  EXPECT_EQ(dtype("a0"), Dtype::bf16);
  EXPECT_EQ(dtype("b0"), Dtype::f16);
  EXPECT_EQ(dtype("b1"), Dtype::f32);
  EXPECT_EQ(dtype("c"), Dtype::bf16);
  EXPECT_EQ(made.decodings.size(), 4u);
}

// ---- as JSON

TEST_F(Decodings, RecipesComeBackAsTheyWere) {
  const Recipes made = recipes();
  const std::string text = to_json(made, *catalog_);
  const Recipes again = recipes_from_json(*catalog_, text);
  EXPECT_EQ(again.decodings, made.decodings);
  ASSERT_EQ(again.targets.size(), made.targets.size());
  for (std::size_t i = 0; i < made.targets.size(); ++i) {
    EXPECT_EQ(again.targets[i].boxes, made.targets[i].boxes);
  }
  EXPECT_EQ(to_json(again, *catalog_), text);
}

TEST_F(Decodings, PlansComeBackAsTheyWere) {
  const Plan made = plan();
  const std::string text = to_json(made);
  const Plan again = plan_from_json(text, options_);
  EXPECT_EQ(again.decodings, made.decodings);
  for (std::size_t i = 0; i < made.targets.size(); ++i) {
    EXPECT_EQ(again.targets[i].recipe.boxes, made.targets[i].recipe.boxes);
  }
  EXPECT_EQ(to_json(again), text);
}

struct Change {
  const char* from;
  const char* to;
};

std::string changed(std::string text, const Change& change) {
  const auto at = text.find(change.from);
  EXPECT_NE(at, std::string::npos) << change.from;
  return at == std::string::npos
             ? text
             : text.replace(at, std::string_view(change.from).size(), change.to);
}

TEST_F(Decodings, RecipesThatLieAreRefused) {
  const std::string text = to_json(recipes(), *catalog_);
  ASSERT_THAT(text, HasSubstr(R"("decodings":[["fp8_block",[0,1],[4,6],"BF16"])"));
  for (const Change& each :
       {Change{"\"fp8_block\"", "\"fp9_block\""}, Change{"\"fp8_block\"", "7"},
        Change{"\"fp8_block\"", "\"mxfp4\""}, Change{"[0,1],[4,6]", "[1,0],[4,6]"},
        Change{"[0,1],[4,6]", "[0,9],[4,6]"}, Change{"[0,1],[4,6]", "[0],[4,6]"},
        Change{"[0,1],[4,6]", "[0,1,1],[4,6]"}, Change{"[0,1],[4,6]", "[],[4,6]"},
        Change{"[0,1],[4,6]", "[0,1],[6,4]"}, Change{"[0,1],[4,6]", "[0,1],[4,-6]"},
        Change{"[4,6],\"BF16\"]", "[4,6],\"I32\"]"}, Change{"[4,6],\"BF16\"]", "[4,6]]"},
        Change{"[[7,0,0,", "[[10,0,0,"}}) {
    const std::string bad = changed(text, each);
    EXPECT_EQ(code_of([&] { (void)recipes_from_json(*catalog_, bad); }), "plan.recipe")
        << each.from << " to " << each.to;
  }
}

TEST_F(Decodings, PlansThatLieAreRefused) {
  const std::string text = to_json(plan());
  ASSERT_THAT(text, HasSubstr(R"("kernel": "fp8_block","sources": [0,1],"shape": [4,6])"));
  const auto code = [&](const char* from, const char* to) {
    const std::string bad = changed(text, {from, to});
    return code_of([&] { (void)plan_from_json(bad, options_); });
  };
  EXPECT_EQ(code("\"fp8_block\"", "\"fp9_block\""), "plan.json");
  EXPECT_EQ(code("\"sources\": [0,1]", "\"sources\": [1,0]"), "plan.json");
  EXPECT_EQ(code("\"sources\": [0,1]", "\"sources\": [0,99]"), "plan.json");
  EXPECT_EQ(code("\"sources\": [0,1]", "\"sources\": [0]"), "plan.json");
  EXPECT_EQ(code("\"sources\": [0,1]", "\"sources\": [0,4294967296]"), "plan.json");
  EXPECT_EQ(code("\"sources\": [0,1],\"shape\": [4,6]", "\"sources\": [0,1],\"shape\": [6,4]"),
            "plan.json");
  EXPECT_EQ(code("\"shape\": [4,6],\"dtype\": \"BF16\"", "\"shape\": [4,6],\"dtype\": \"I16\""),
            "plan.json");
  EXPECT_EQ(code("\"decoding\": 1", "\"decoding\": 3"), "plan.box");
  EXPECT_EQ(code("\"decoding\": 1", "\"decoding\": 4294967295"), "plan.json");
  EXPECT_EQ(code("\"decoding\": 1", "\"decoding\": 1,\"source\": 1"), "plan.json");
  EXPECT_EQ(code("\"decoding\": 1", "\"source\": 1"), "plan.box");
  EXPECT_EQ(code("\"decodings\"", "\"decoding\""), "plan.json");
  // Control: the unchanged text is a valid plan.
  EXPECT_EQ(code_of([&] { (void)plan_from_json(text, options_); }), "");
}

}  // namespace
}  // namespace loadstone::test
