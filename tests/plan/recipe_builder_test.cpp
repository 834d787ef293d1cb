#include "loadstone/recipe_builder.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <random>

#include "boxes/cast_kind.h"
#include "loadstone/error.h"
#include "support/plans.h"

namespace loadstone::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Value = RecipeBuilder::Value;

// Returns the message, the found and the expected text of the Error "plan.recipe" that `work`
// throws.
template <typename Work>
std::string refusal(Work work) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), "plan.recipe");
    return error.what();
  }
  return "nothing was thrown";
}

Elements made_of(RecipeBuilder& builder, Value value) {
  builder.add("t", value);
  const Recipes recipes = builder.finish();
  EXPECT_EQ(recipes.targets.size(), 1u);
  EXPECT_EQ(recipes.targets[0].shape, builder.shape(value));
  EXPECT_EQ(recipes.targets[0].dtype, builder.dtype(value));
  return written(recipes.targets[0].boxes, recipes.targets[0].shape);
}

Elements every(const Elements& from, std::size_t dim, std::uint64_t start, std::uint64_t size,
               std::uint64_t step) {
  auto extents = from.shape.extents();
  extents[dim] = size;
  return Elements::make(Shape(extents), [&](Elements::Index index) {
    index[dim] = start + index[dim] * step;
    return from.at(index);
  });
}

TEST(RecipeBuilder, EachOperationIsWhatItsNameSays) {
  RecipeBuilder builder(fake_catalog({{"a", {2, 3, 4}}, {"b", {2, 3, 4}}}));
  const Value a = builder.source("a");
  const Value b = builder.source("b");
  const auto of_a = Elements::of_source(0, {2, 3, 4});
  const auto of_b = Elements::of_source(1, {2, 3, 4});
  EXPECT_EQ(made_of(builder, builder.transpose(a, 0, -1)), of_a.permuted({2, 1, 0}));
  EXPECT_EQ(made_of(builder, builder.permute(a, {1, 2, 0})), of_a.permuted({1, 2, 0}));
  EXPECT_EQ(made_of(builder, builder.slice(a, 1, 1, 2)), of_a.sliced(1, 1, 2));
  EXPECT_EQ(made_of(builder, builder.reshape(a, {4, 6})), of_a.reshaped({4, 6}));
  EXPECT_EQ(made_of(builder, builder.concat({b, a}, 1)), Elements::concat({of_b, of_a}, 1));
  EXPECT_EQ(made_of(builder, builder.stack({b, a}, -1)), Elements::stack({of_b, of_a}, 3));
  // Operations must not change the values that they take.
  EXPECT_EQ(made_of(builder, a), of_a);
  EXPECT_EQ(builder.shape(b), Shape({2, 3, 4}));
}

TEST(RecipeBuilder, SlicesWithEveryStep) {
  for (std::uint64_t extent = 1; extent < 14; ++extent) {
    RecipeBuilder builder(fake_catalog({{"a", {2, extent, 3}}}));
    const Value turned = builder.transpose(builder.source("a"), 0, 2);
    const auto elements = Elements::of_source(0, {2, extent, 3}).permuted({2, 1, 0});
    for (std::uint64_t step = 1; step < 6; ++step) {
      for (std::uint64_t start = 0; start < extent; ++start) {
        for (std::uint64_t size = 0; size == 0 || start + (size - 1) * step < extent; ++size) {
          EXPECT_EQ(made_of(builder, builder.slice(turned, 1, start, size, step)).ids,
                    every(elements, 1, start, size, step).ids)
              << extent << " from " << start << " on, " << size << ", " << step << " apart";
        }
      }
    }
  }
}

// Each half of an interleaved tensor, as in fused projections, is a single box.
TEST(RecipeBuilder, EverySecondIsOneBox) {
  RecipeBuilder builder(fake_catalog({{"a", {4, 8}}}));
  const Value a = builder.source("a");
  for (std::uint64_t start = 0; start < 2; ++start) {
    builder.add(fmt::format("t{}", start), builder.slice(a, 1, start, 4, 2));
  }
  for (const TargetRecipe& recipe : builder.finish().targets) {
    EXPECT_EQ(recipe.boxes.size(), 1u) << recipe.target;
  }
}

// Compares random chains of operations with plain loops over the elements.
TEST(RecipeBuilder, RandomChainsGiveTheSameElements) {
  std::mt19937 random(7);  // NOLINT: a fixed seed
  const auto below = [&](std::uint64_t bound) { return random() % bound; };
  for (int round = 0; round < 60; ++round) {
    RecipeBuilder builder(fake_catalog({{"a", {4, 6}}, {"b", {4, 6}}}));
    Value value = builder.stack({builder.source("a"), builder.source("b")}, 0);
    Elements elements =
        Elements::stack({Elements::of_source(0, {4, 6}), Elements::of_source(1, {4, 6})}, 0);
    for (int i = 0; i < 5; ++i) {
      const std::size_t rank = elements.shape.rank();
      const std::size_t dim = below(rank);
      const std::uint64_t extent = elements.shape[dim];
      if (below(3) == 0) {
        value = builder.transpose(value, 0, static_cast<std::int64_t>(dim));
        std::vector<std::size_t> order(rank);
        for (std::size_t d = 0; d < rank; ++d) order[d] = d;
        std::swap(order[0], order[dim]);
        elements = elements.permuted(order);
      } else if (below(2) == 0) {
        const std::uint64_t step = 1 + below(2);
        const std::uint64_t size = (extent + step - 1) / step;
        value = builder.slice(value, static_cast<std::int64_t>(dim), 0, size, step);
        elements = every(elements, dim, 0, size, step);
      } else {
        value = builder.concat({value, value}, static_cast<std::int64_t>(dim));
        elements = Elements::concat({elements, elements}, dim);
        value = builder.reshape(value, {elements.shape.numel().value() / 2, 2});
        elements = elements.reshaped({elements.shape.numel().value() / 2, 2});
      }
    }
    ASSERT_EQ(made_of(builder, value), elements) << "round " << round;
  }
}

TEST(RecipeBuilder, MisfitsAreRefusedWithWhatWasFound) {
  RecipeBuilder builder(fake_catalog({{"a", {2, 3}}, {"b", {2, 4}, Dtype::bf16}, {"c", {2, 4}}}));
  const Value a = builder.source("a");
  const Value b = builder.source("b");
  const Value c = builder.source("c");
  EXPECT_THAT(refusal([&] { (void)builder.source("x"); }), HasSubstr("no tensor of this name"));
  EXPECT_THAT(refusal([&] { (void)builder.transpose(a, 0, 2); }), HasSubstr("[2, 3]"));
  EXPECT_THAT(refusal([&] { (void)builder.permute(a, {0, 0}); }), HasSubstr("twice"));
  EXPECT_THAT(refusal([&] { (void)builder.slice(a, 1, 2, 2); }), HasSubstr("[2, 3]"));
  EXPECT_THAT(refusal([&] { (void)builder.slice(a, 1, 0, 2, 3); }), HasSubstr("[2, 3]"));
  EXPECT_THAT(refusal([&] { (void)builder.slice(a, 1, 0, 2, 0); }), HasSubstr("[2, 3]"));
  EXPECT_THAT(refusal([&] { (void)builder.slice(a, 1, 1, UINT64_MAX, UINT64_MAX); }),
              HasSubstr("[2, 3]"));
  EXPECT_THAT(refusal([&] { (void)builder.reshape(a, {7}); }), HasSubstr("[2, 3]"));
  EXPECT_THAT(refusal([&] { (void)builder.concat({a, c}, 0); }), HasSubstr("[2, 4]"));
  EXPECT_THAT(refusal([&] { (void)builder.stack({b, c}, 0); }), HasSubstr("BF16 and F32"));
  EXPECT_THAT(refusal([&] { (void)builder.stack({}, 0); }), HasSubstr("empty"));
  EXPECT_THAT(refusal([&] { (void)builder.reshape(77, {7}); }),
              HasSubstr("no value has this number"));
  builder.add("t", a);
  EXPECT_THAT(refusal([&] { builder.add("t", a); }), HasSubstr("already"));
  // After the errors the builder still contains the valid value.
  EXPECT_EQ(builder.finish().targets.size(), 1u);
}

TEST(RecipeBuilder, TensorsOfBlockFormatsCanOnlyBeDecoded) {
  RecipeBuilder builder(fake_catalog({{"a", {2, 256}, BlockFormat::q4_k}}));
  const Value a = builder.source("a");
  EXPECT_THAT(refusal([&] { (void)builder.transpose(a, 0, 1); }), HasSubstr("only be decoded"));
  EXPECT_THAT(refusal([&] { builder.add("t", a); }), HasSubstr("only be decoded"));
  EXPECT_THAT(refusal([&] {
                (void)builder.decode("gguf", {a}, Shape({256, 2}), Dtype::f32);
              }),
              HasSubstr("[2, 256]"));
  const Value numbers = builder.decode("gguf", {a}, Shape({2, 256}), Dtype::f32);
  const Value bytes = builder.decode("bytes", {a}, Shape({2, 144}), Dtype::u8);
  builder.add("numbers", builder.transpose(numbers, 0, 1));
  builder.add("bytes", bytes);
  EXPECT_EQ(builder.finish().targets.size(), 2U);
}

// ---- casts

TEST(RecipeBuilder, ASecondCastNeedsAnExactFirstOne) {
  RecipeBuilder builder(
      fake_catalog({{"h", {2}, Dtype::bf16}, {"w", {2}}, {"i", {2}, Dtype::i32}}));
  const Value h = builder.source("h");
  const Value w = builder.source("w");
  const Value wide = builder.cast(h, Dtype::f32);
  EXPECT_EQ(builder.dtype(wide), Dtype::f32);
  EXPECT_EQ(builder.dtype(h), Dtype::bf16);
  EXPECT_EQ(builder.dtype(builder.cast(wide, Dtype::f16)), Dtype::f16);
  const Value narrow = builder.cast(w, Dtype::bf16);
  EXPECT_EQ(builder.cast(narrow, Dtype::bf16), narrow);
  EXPECT_THAT(refusal([&] { (void)builder.cast(narrow, Dtype::f32); }), HasSubstr("BF16 to F32"));
  const Value both = builder.concat({wide, wide}, 0);
  EXPECT_EQ(builder.dtype(builder.cast(both, Dtype::bf16)), Dtype::bf16);
  // If one input of an operation was rounded, so is the result.
  const Value mixed = builder.concat({narrow, h}, 0);
  EXPECT_THAT(refusal([&] { (void)builder.cast(mixed, Dtype::f32); }), HasSubstr("rounds"));
  EXPECT_THAT(refusal([&] { (void)builder.cast(builder.source("i"), Dtype::f32); }),
              HasSubstr("no cast"));
}

TEST(RecipeBuilder, OnlyACountBecomesAFloat) {
  RecipeBuilder builder(fake_catalog(
      {{"n", {2}, Dtype::i64}, {"b", {2}, Dtype::boolean}, {"i", {2}, Dtype::i32}, {"w", {2}}}));
  for (const char* const name : {"n", "b"}) {
    const Value count = builder.source(name);
    EXPECT_THAT(refusal([&] { (void)builder.cast(count, Dtype::f32); }), HasSubstr("no cast"));
    EXPECT_EQ(builder.dtype(builder.cast(count, Dtype::f32, true)), Dtype::f32);
  }
  EXPECT_THAT(refusal([&] { (void)builder.cast(builder.source("i"), Dtype::f32, true); }),
              HasSubstr("no cast"));
  EXPECT_THAT(refusal([&] { (void)builder.cast(builder.source("w"), Dtype::i64, true); }),
              HasSubstr("no cast"));
}

TEST(Dtypes, AnExactCastHasEveryValue) {
  const auto exact = [](Dtype source) {
    std::vector<Dtype> targets;
    for (const Dtype target : {Dtype::f64, Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::f8_e4m3,
                               Dtype::f8_e5m2, Dtype::i64, Dtype::i8, Dtype::u16}) {
      if (is_exact(source, target)) targets.push_back(target);
    }
    return targets;
  };
  EXPECT_THAT(exact(Dtype::bf16), ElementsAre(Dtype::f64, Dtype::f32, Dtype::bf16));
  EXPECT_THAT(exact(Dtype::f16), ElementsAre(Dtype::f64, Dtype::f32, Dtype::f16));
  EXPECT_THAT(exact(Dtype::f32), ElementsAre(Dtype::f64, Dtype::f32));
  EXPECT_THAT(exact(Dtype::f8_e4m3),
              ElementsAre(Dtype::f64, Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::f8_e4m3));
  EXPECT_THAT(exact(Dtype::f8_e5m2),
              ElementsAre(Dtype::f64, Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::f8_e5m2));
  EXPECT_THAT(exact(Dtype::f8_e8m0), ElementsAre(Dtype::f64, Dtype::f32, Dtype::bf16));
  EXPECT_THAT(exact(Dtype::u8), ElementsAre(Dtype::i64, Dtype::u16));
  EXPECT_THAT(exact(Dtype::i8), ElementsAre(Dtype::i64, Dtype::i8));
}

// ---- plans with recipes

TEST(MakePlan, ARecipeThatRoundsGivesOnlyItsDtype) {
  const auto catalog = fake_catalog({{"w", {2}}});
  RecipeBuilder builder(catalog);
  builder.add("t", builder.cast(builder.source("w"), Dtype::bf16));
  PlanOptions options;
  options.recipes = builder.finish();
  const Skeleton wide = skeleton_of({target_of("t", {2})});
  const auto findings = found(make_plan(catalog, wide, options), "plan.recipe");
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].target, "t");
  EXPECT_EQ(findings[0].found, "BF16");
  EXPECT_EQ(findings[0].expected, "F32");
  const Skeleton narrow = skeleton_of({target_of("t", {2}, Dtype::bf16)});
  EXPECT_TRUE(make_plan(catalog, narrow, options).ok());
  options.dtype_from_file = true;  // the recipe's dtype replaces the file's
  EXPECT_EQ(planned(make_plan(catalog, wide, options), "t").dtype, Dtype::bf16);
}

TEST(MakePlan, ARecipeHasTheTargetsShape) {
  const auto catalog = fake_catalog({{"w", {2, 3}}});
  RecipeBuilder builder(catalog);
  builder.add("t", builder.source("w"));
  PlanOptions options;
  options.recipes = builder.finish();
  const auto findings =
      found(make_plan(catalog, skeleton_of({target_of("t", {3, 2})}), options), "plan.shape");
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].found, "[2, 3]");
}

TEST(MakePlan, KnownSourcesAreNeitherUsedNorUnexpected) {
  const auto catalog = fake_catalog({{"a", {2}}, {"b", {2}}, {"c", {2}}});
  PlanOptions options;
  options.caller.known_sources = {"b", "not there"};
  const Plan plan =
      make_plan(catalog, skeleton_of({target_of("a", {2}), target_of("b", {2})}), options);
  EXPECT_EQ(planned(plan, "a").recipe.origin, Origin::checkpoint);
  ASSERT_EQ(found(plan, "plan.missing").size(), 1u);
  EXPECT_EQ(found(plan, "plan.missing")[0].target, "b");
  ASSERT_EQ(found(plan, "plan.unexpected").size(), 1u);
  EXPECT_THAT(found(plan, "plan.unexpected")[0].sources, ElementsAre("c"));
}

// ---- JSON

bool same(const Recipes& a, const Recipes& b) {
  return std::ranges::equal(a.targets, b.targets, [](const auto& x, const auto& y) {
    return x.target == y.target && x.shape == y.shape && x.dtype == y.dtype && x.boxes == y.boxes;
  });
}

TEST(RecipesJson, ComeBackAsTheyWere) {
  const auto catalog = fake_catalog({{"a", {4, 6}}, {"b\"\n", {4, 6}}, {"s", {}}, {"e", {0, 3}}});
  RecipeBuilder builder(catalog);
  const Value b = builder.source("b\"\n");
  builder.add("t", builder.transpose(builder.stack({b, builder.source("a")}, 0), 1, 2));
  builder.add("half", builder.cast(builder.slice(b, 1, 1, 3, 2), Dtype::bf16));
  builder.add("scalar", builder.source("s"));
  builder.add("empty", builder.source("e"));
  const Recipes recipes = builder.finish();
  const std::string text = to_json(recipes, *catalog);
  EXPECT_TRUE(same(recipes_from_json(*catalog, text), recipes));
  EXPECT_EQ(to_json(recipes_from_json(*catalog, text), *catalog), text);
  // The other catalog has the same tensors with different indices.
  const auto other = fake_catalog({{"e", {0, 3}}, {"s", {}}, {"b\"\n", {4, 6}}, {"a", {4, 6}}});
  const Recipes moved = recipes_from_json(*other, text);
  EXPECT_FALSE(same(moved, recipes));
  EXPECT_EQ(to_json(moved, *other), text);
}

TEST(RecipesJson, WhatIsNoRecipeIsRefused) {
  const auto catalog = fake_catalog({{"a", {4}}});
  const std::string good =
      R"({"version":2,"sources":[["a","F32",[4]]],"targets":[["t",[4],"F32",[[0,0,0,4,1,1]]]]})";
  EXPECT_EQ(recipes_from_json(*catalog, good).targets.size(), 1u);
  struct Case {
    const char* found;
    const char* replacement;
    const char* says;
  };
  for (const Case& each : {
           Case{"\"version\":2", "\"version\":1", "version"},
           Case{"\"version\":2,", "", "version"},
           Case{"\"version\"", "\"more\":1,\"version\"", "the field is unknown"},
           Case{"[\"a\",", "[\"x\",", "no tensor of this name"},
           Case{"[\"a\",", "[7,", "sources[0]"},
           Case{"[\"a\",\"F32\",[4]]", "\"a\"", "sources[0]"},
           Case{"[\"a\",\"F32\",[4]]", "[\"a\"]", "three or four parts"},
           Case{"[\"a\",\"F32\",[4]]", "", "source does not exist"},
           Case{"[\"a\",\"F32\",[4]]", "[\"a\",\"F32\",[5]]", "shape"},
           Case{"[\"a\",\"F32\",[4]]", "[\"a\",\"F32\",[2,2]]", "shape"},
           Case{"[\"a\",\"F32\",[4]]", "[\"a\",\"BF16\",[4]]", "encoding"},
           Case{"[\"a\",\"F32\",[4]]", "[\"a\",\"F32\",[4],\"nf4\"]", "plain values"},
           Case{"[4],\"F32\"", "[4],\"F33\"", "the dtype is unknown"},
           Case{"[4],\"F32\",", "[4],", "four parts"},
           Case{"[4],\"F32\"", "[4, -1],\"F32\"", "targets[0]"},
           Case{"[4],\"F32\"", "[4294967296,4294967296,4],\"F32\"", "64 bits"},
           Case{"[0,0,0,4,1,1]", "[1,0,0,4,1,1]", "source does not exist"},
           Case{"[0,0,0,4,1,1]", "[0,0,0,4,1]", "numbers"},
           Case{"[0,0,0,4,1,1]", "[]", "numbers"},
           Case{"[0,0,0,4,1,1]", "[0,0,0,4,1,1.5]", "targets[0]"},
           Case{"[0,0,0,4,1,1]", "[-1,0,0,4,1,1]", "targets[0]"},
           Case{"]}", "]", ""},
       }) {
    std::string text = good;
    text.replace(text.find(each.found), std::string_view(each.found).size(), each.replacement);
    const std::string message = refusal([&] { (void)recipes_from_json(*catalog, text); });
    EXPECT_NE(message, "nothing was thrown") << text;
    EXPECT_THAT(message, HasSubstr(each.says)) << text;
  }
}

// The plan rejects boxes that are outside of their source. The JSON reader accepts them.
TEST(RecipesJson, BoxesAreCheckedByThePlan) {
  const auto catalog = fake_catalog({{"a", {4}}});
  PlanOptions options;
  options.recipes = recipes_from_json(
      *catalog,
      R"({"version":2,"sources":[["a","F32",[4]]],"targets":[["t",[4],"F32",[[0,1,0,4,1,1]]]]})");
  const Plan plan = make_plan(catalog, skeleton_of({target_of("t", {4})}), options);
  EXPECT_EQ(found(plan, "plan.box").size(), 1u);
}

// DeepSeek-V3 has 174 targets that take 256 sources each.
TEST(RecipesJson, ManyBoxesComeBackToo) {
  std::vector<FakeTensor> sources;
  for (int i = 0; i < 174 * 256; ++i) {
    sources.push_back({fmt::format("model.layers.{}.mlp.experts.{}.w", i / 256, i % 256), {2, 3}});
  }
  const auto catalog = fake_catalog(sources);
  RecipeBuilder builder(catalog);
  for (int layer = 0; layer < 174; ++layer) {
    std::vector<Value> parts;
    for (int e = 0; e < 256; ++e) {
      parts.push_back(builder.source(sources[static_cast<std::size_t>(layer * 256 + e)].name));
    }
    builder.add(fmt::format("layers.{}", layer), builder.stack(parts, 0));
  }
  const Recipes recipes = builder.finish();
  EXPECT_TRUE(same(recipes_from_json(*catalog, to_json(recipes, *catalog)), recipes));
}

}  // namespace
}  // namespace loadstone::test
