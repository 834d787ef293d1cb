#include "loadstone/skeleton.h"

#include <gmock/gmock.h>

#include "loadstone/catalog.h"
#include "support/errors.h"

namespace loadstone::test {
namespace {

using ::testing::HasSubstr;

constexpr const char* good = R"j({"targets": [
  {"name": "embed", "shape": [4, 2], "dtype": "BF16", "kind": "parameter", "tie_of": null},
  {"name": "head", "shape": [4, 2], "dtype": "bfloat16", "kind": "parameter", "tie_of": "embed"},
  {"name": "mean", "shape": [], "dtype": "I64", "kind": "persistent_buffer"},
  {"name": "rope.freqs[0]", "shape": [0, 3], "dtype": "F32", "kind": "attribute"},
  {"name": "plain \"\u00e4\n", "shape": [1], "dtype": "F4", "kind": "non_persistent_buffer"}
]})j";

TEST(Skeleton, ReadsWhatItWrites) {
  std::string text = good;
  text.replace(text.find("[1]"), 3, "[2]");
  const Skeleton skeleton = Skeleton::from_json(text);
  ASSERT_EQ(skeleton.targets.size(), 5u);
  EXPECT_FALSE(skeleton.values_known);
  EXPECT_EQ(skeleton.targets[1].tie_of, "embed");
  EXPECT_EQ(skeleton.targets[1].dtype, Dtype::bf16);
  EXPECT_EQ(skeleton.targets[2].kind, TargetKind::persistent_buffer);
  EXPECT_EQ(skeleton.targets[2].shape, Shape());
  EXPECT_EQ(skeleton.targets[3].kind, TargetKind::attribute);
  EXPECT_EQ(skeleton.targets[4].name, "plain \"\u00e4\n");
  const std::string written = skeleton.to_json();
  EXPECT_EQ(Skeleton::from_json(written).to_json(), written);
}

TEST(Skeleton, HalfAByteIsNoSize) {
  const auto error = error_of([] { (void)Skeleton::from_json(good); });
  ASSERT_TRUE(error);
  EXPECT_THAT(error->where().field, HasSubstr("targets[4].shape"));
}

TEST(Skeleton, KindIsAParameterUnlessSaid) {
  const auto skeleton =
      Skeleton::from_json(R"({"targets": [{"name": "a", "shape": [1], "dtype": "F32"}]})");
  EXPECT_EQ(skeleton.targets[0].kind, TargetKind::parameter);
}

struct Bad {
  const char* targets;
  const char* field;
};

class RefusedSkeleton : public testing::TestWithParam<Bad> {};

TEST_P(RefusedSkeleton, NamesTheField) {
  const std::string text = std::string(R"({"targets": )") + GetParam().targets + "}";
  const auto error = error_of([&] { (void)Skeleton::from_json(text); });
  ASSERT_TRUE(error) << text;
  EXPECT_EQ(error->code(), "skeleton.json");
  EXPECT_EQ(error->where().field, GetParam().field) << error->what();
}

constexpr const char* a = R"({"name": "a", "shape": [1], "dtype": "F32"})";

INSTANTIATE_TEST_SUITE_P(
    Each, RefusedSkeleton,
    testing::Values(
        Bad{"1", "targets"}, Bad{"[1]", "targets[0]"}, Bad{"[{}]", "targets[0].name"},
        Bad{R"([{"name": 1, "shape": [], "dtype": "F32"}])", "targets[0].name"},
        Bad{R"([{"name": "a", "dtype": "F32"}])", "targets[0].shape"},
        Bad{R"([{"name": "a", "shape": [-1], "dtype": "F32"}])", "targets[0].shape[0]"},
        Bad{R"([{"name": "a", "shape": [1, 2.5], "dtype": "F32"}])", "targets[0].shape[1]"},
        Bad{R"([{"name": "a", "shape": ["1"], "dtype": "F32"}])", "targets[0].shape[0]"},
        Bad{R"([{"name": "a", "shape": [4294967296, 4294967296], "dtype": "F32"}])",
            "targets[0].shape"},
        Bad{R"([{"name": "a", "shape": [4611686018427387904], "dtype": "F64"}])",
            "targets[0].shape"},
        Bad{R"([{"name": "a", "shape": [], "dtype": "F33"}])", "targets[0].dtype"},
        Bad{R"([{"name": "a", "shape": [], "dtype": "F32", "kind": "buffer"}])", "targets[0].kind"},
        Bad{R"([{"name": "a", "shape": [], "dtype": "F32", "tie": "b"}])", "targets[0].tie"},
        Bad{R"([{"name": "a", "shape": [], "shape": [1], "dtype": "F32"}])", "targets[0].shape"},
        Bad{R"([{"name": "a", "shape": [], "dtype": "F32", "tie_of": "a"}])", "targets[0].tie_of"},
        Bad{R"([{"name": "a", "shape": [], "dtype": "F32", "tie_of": "b"}])", "targets[0].tie_of"},
        Bad{R"([{"name": "a", "shape": [], "dtype": "F32", "tie_of": ""}])", "targets[0].tie_of"},
        Bad{R"([{"name": "a", "shape": [], "dtype": "F32"},
                {"name": "b", "shape": [], "dtype": "F32", "tie_of": "a"},
                {"name": "c", "shape": [1], "dtype": "F32", "tie_of": "b"}])",
            "targets[2].shape"},
        Bad{R"([{"name": "a", "shape": [], "dtype": "F32", "tie_of": "c"},
                {"name": "b", "shape": [], "dtype": "F32", "tie_of": "a"},
                {"name": "c", "shape": [], "dtype": "F32", "tie_of": "b"}])",
            "targets[0].tie_of"},
        Bad{R"([{"name": "a", "shape": [], "dtype": "F32"},
                {"name": "b", "shape": [], "dtype": "F32", "tie_of": "c"},
                {"name": "c", "shape": [], "dtype": "F32", "tie_of": "d"}])",
            "targets[2].tie_of"},
        Bad{R"([{"name": "a", "shape": [], "dtype": "F32"},
                {"name": "b", "shape": [1], "dtype": "F32", "tie_of": "a"}])",
            "targets[1].shape"},
        Bad{R"([{"name": "a", "shape": [], "dtype": "F32"},
                {"name": "b", "shape": [], "dtype": "F16", "tie_of": "a"}])",
            "targets[1].dtype"},
        Bad{R"([{"name": "a", "shape": [], "dtype": "F32"},
                {"name": "a", "shape": [], "dtype": "F32"}])",
            "targets[1].name"}));

TEST(Skeleton, TextThatIsNoDocument) {
  for (const std::string& text : {std::string(), std::string("{"), std::string("[]"),
                                  std::string("{}"), std::string("nonsense"), std::string(100, '['),
                                  R"({"targets": [], "more": 1})" + std::string(),
                                  std::string("{\"targets\": [\"\xff\"]}")}) {
    EXPECT_EQ(code_of([&] { (void)Skeleton::from_json(text); }), "skeleton.json") << text;
  }
  EXPECT_EQ(code_of([&] { (void)Skeleton::from_json("{\"targets\": [" + std::string(a) + "]}"); }),
            "");
}

TEST(Skeleton, OfACatalogIsEachTensorAsItIs) {
  Shard shard;
  shard.relative_path = "x";
  TensorInfo plain;
  plain.name = "a";
  plain.encoding = Dtype::i8;
  plain.shape = {3};
  TensorInfo blocks = plain;
  blocks.name = "b";
  blocks.encoding = BlockFormat::q8_0;
  blocks.shape = {2, 32};
  const Catalog catalog("/", {shard}, {plain, blocks}, {}, {});
  const Skeleton skeleton = Skeleton::from_catalog(catalog);
  ASSERT_EQ(skeleton.targets.size(), 2u);
  EXPECT_EQ(skeleton.targets[0].dtype, Dtype::i8);
  EXPECT_EQ(skeleton.targets[1].dtype, Dtype::f32);
  EXPECT_EQ(skeleton.targets[1].shape, (Shape{2, 32}));
}

TEST(Skeleton, KindsHaveNames) {
  for (const TargetKind kind : {TargetKind::parameter, TargetKind::persistent_buffer,
                                TargetKind::non_persistent_buffer, TargetKind::attribute}) {
    EXPECT_EQ(parse_target_kind(name(kind)), kind);
  }
  EXPECT_FALSE(parse_target_kind("Parameter"));
}

}  // namespace
}  // namespace loadstone::test
