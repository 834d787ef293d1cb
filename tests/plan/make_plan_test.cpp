// Tests origins, dtypes, policies and findings of plans.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include "loadstone/plan.h"
#include "support/errors.h"
#include "support/plans.h"

namespace loadstone::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr auto persistent = TargetKind::persistent_buffer;
constexpr auto non_persistent = TargetKind::non_persistent_buffer;

Target with_value(Target target) {
  target.has_value = true;
  return target;
}

TEST(MakePlan, NamesThatMatchAreMovedAsTheyAre) {
  const Plan plan = make_plan(fake_catalog({{"a", {2, 3}}, {"b", {}}}),
                              skeleton_of({target_of("b", {}), target_of("a", {2, 3})}));
  EXPECT_TRUE(plan.findings.empty());
  ASSERT_EQ(plan.targets.size(), 2u);
  EXPECT_EQ(plan.targets[0].name, "b");
  EXPECT_EQ(plan.targets[1].recipe.origin, Origin::checkpoint);
  EXPECT_THAT(plan.targets[1].recipe.boxes, ElementsAre(Box{0, 0, 0, {{6, 1, 1}}}));
  EXPECT_EQ(plan.targets[1].device, "cpu");
  EXPECT_EQ(plan.targets[1].delivery, Delivery::memory);
  EXPECT_EQ(plan.bytes_to_read, 28u);
  EXPECT_EQ(plan.bytes_to_write, 0u);
}

TEST(MakePlan, SkeletonOfTheCatalogNeedsNothingElse) {
  const auto catalog = fake_catalog({{"a", {2, 3}, Dtype::bf16}, {"n", {0, 5}, Dtype::i64}});
  const Plan plan = make_plan(catalog, Skeleton::from_catalog(*catalog));
  EXPECT_TRUE(plan.findings.empty());
  EXPECT_EQ(plan.targets[1].dtype, Dtype::i64);
  ASSERT_EQ(plan.targets[1].recipe.boxes.size(), 1u);  // its provenance
  EXPECT_EQ(plan.bytes_to_read, 12u);
}

// ---- missing and unexpected

TEST(MakePlan, AllMissingTensorsAreFoundAtOnce) {
  std::vector<Target> targets;
  for (int i = 0; i < 300; ++i) targets.push_back(target_of(fmt::format("layer.{}.w", i), {4}));
  const Plan plan = make_plan(fake_catalog({}), skeleton_of(targets));
  const auto missing = found(plan, "plan.missing");
  ASSERT_EQ(missing.size(), 300u);
  EXPECT_FALSE(plan.ok());
  for (const Finding& finding : missing) {
    EXPECT_EQ(finding.severity, Severity::error);
    EXPECT_THAT(finding.message, HasSubstr("'" + finding.target + "'"));
    EXPECT_THAT(finding.message, HasSubstr("16 B"));
    EXPECT_THAT(finding.sources, ElementsAre(finding.target));
  }
  for (const PlannedTarget& target : plan.targets) {
    EXPECT_EQ(target.recipe.origin, Origin::excluded);
    EXPECT_FALSE(target.recipe.reason.empty());
    EXPECT_EQ(target.delivery, Delivery::none);
  }
  const auto error = error_of([&] { require_ok(plan); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), "plan.missing");
  EXPECT_THAT(error->what(), HasSubstr("299 more"));
}

TEST(MakePlan, MissingPolicies) {
  const auto skeleton =
      skeleton_of({target_of("p", {4}), target_of("b", {2}, Dtype::f32, persistent),
                   with_value(target_of("v", {2}, Dtype::f32, persistent))});
  PlanOptions options;
  options.missing = MissingPolicy::zeros;
  const Plan zeros = make_plan(fake_catalog({}), skeleton, options);
  EXPECT_TRUE(zeros.ok());
  EXPECT_EQ(found(zeros, "plan.missing").size(), 3u);
  EXPECT_EQ(planned(zeros, "p").recipe.origin, Origin::zeros);
  EXPECT_EQ(planned(zeros, "p").delivery, Delivery::memory);
  EXPECT_EQ(zeros.peak_bytes.at("cpu"), 32u);
  options.missing = MissingPolicy::initialise;
  const Plan initialise = make_plan(fake_catalog({}), skeleton, options);
  EXPECT_TRUE(initialise.ok());
  EXPECT_EQ(planned(initialise, "p").recipe.origin, Origin::initialiser);
  EXPECT_EQ(planned(initialise, "p").delivery, Delivery::none);
  EXPECT_EQ(planned(initialise, "b").recipe.origin, Origin::initialiser);
  EXPECT_EQ(planned(initialise, "v").recipe.origin, Origin::constructor);
  for (const Finding& finding : found(initialise, "plan.missing")) {
    EXPECT_EQ(finding.severity, Severity::warning);
  }
}

TEST(MakePlan, KeptIsWhatTheModelHolds) {
  Target held = target_of("held", {4}, Dtype::bf16);
  held.held = Held{.device = "cpu", .dtype = Dtype::f16};
  Target tied = target_of("tied", {4}, Dtype::bf16);
  tied.tie_of = "held";
  PlanOptions options;
  options.missing = MissingPolicy::keep;
  options.dtype = Dtype::f32;
  const Plan plan = make_plan(fake_catalog({{"a", {1}}}),
                              skeleton_of({held, tied, target_of("a", {1})}), options);
  EXPECT_TRUE(plan.ok());
  EXPECT_EQ(planned(plan, "held").recipe.origin, Origin::kept);
  EXPECT_EQ(planned(plan, "held").dtype, Dtype::f16);  // not cast
  EXPECT_EQ(planned(plan, "held").delivery, Delivery::none);
  EXPECT_EQ(planned(plan, "tied").recipe.origin, Origin::tie);
  EXPECT_EQ(found(plan, "plan.kept").size(), 1u);
  EXPECT_EQ(plan.peak_bytes.at("cpu"), 8u + 4u);
  // A target on the meta device has no value to keep.
  EXPECT_FALSE(make_plan(fake_catalog({}), skeleton_of({target_of("m", {4})}), options).ok());
  options.missing = MissingPolicy::error;
  EXPECT_FALSE(make_plan(fake_catalog({}), skeleton_of({held}), options).ok());
  options.caller.missing_of = {{"held", MissingPolicy::keep}};
  EXPECT_TRUE(make_plan(fake_catalog({}), skeleton_of({held}), options).ok());
  options.caller.missing_of.clear();
  options.missing_patterns = {{"he.d", MissingPolicy::keep}};
  EXPECT_TRUE(make_plan(fake_catalog({}), skeleton_of({held}), options).ok());
  options.missing_patterns = {{"he", MissingPolicy::keep}};  // a pattern must match the whole name
  EXPECT_FALSE(make_plan(fake_catalog({}), skeleton_of({held}), options).ok());
  // The policy does not apply to a tensor that is in the checkpoint.
  const Plan loaded = make_plan(fake_catalog({{"held", {4}}}), skeleton_of({held}), options);
  EXPECT_EQ(planned(loaded, "held").recipe.origin, Origin::checkpoint);
}

TEST(MakePlan, UnexpectedPolicies) {
  PlanOptions options;
  const auto plan_with = [&](UnexpectedPolicy policy) {
    options.unexpected = policy;
    return make_plan(fake_catalog({{"a", {1}}, {"stranger", {2}}}),
                     skeleton_of({target_of("a", {1})}), options);
  };
  const Plan warned = plan_with(UnexpectedPolicy::warn);
  EXPECT_TRUE(warned.ok());
  const auto findings = found(warned, "plan.unexpected");
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].severity, Severity::warning);
  EXPECT_THAT(findings[0].sources, ElementsAre("stranger"));
  EXPECT_FALSE(plan_with(UnexpectedPolicy::error).ok());
  EXPECT_TRUE(plan_with(UnexpectedPolicy::ignore).findings.empty());
}

TEST(MakePlan, SuggestsWhatMayBeMeant) {
  const Plan plan = make_plan(
      fake_catalog({{"encoder.layer.0.w", {4, 4}},
                    {"head.wieght", {3}},
                    {"other.layer.0.w", {9}},
                    {"unrelated", {77}}}),
      skeleton_of({target_of("bert.encoder.layer.0.w", {4, 4}), target_of("head.weight", {3})}));
  const auto missing = found(plan, "plan.missing");
  ASSERT_EQ(missing.size(), 2u);
  EXPECT_THAT(missing[0].suggestion, HasSubstr("did you mean 'encoder.layer.0.w'"));
  EXPECT_THAT(missing[1].suggestion, HasSubstr("did you mean 'head.wieght'"));
  for (const Finding& finding : found(plan, "plan.unexpected")) {
    if (finding.sources[0] == "head.wieght") {
      EXPECT_THAT(finding.suggestion, HasSubstr("'head.weight'"));
    }
    if (finding.sources[0] == "unrelated") {
      EXPECT_EQ(finding.suggestion, "");
    }
  }
}

// Returns the suggestion for the only missing target, [4], with these sources of the same shape.
std::string suggestion_for(const std::string& target, const std::vector<std::string>& sources) {
  std::vector<FakeTensor> tensors;
  for (const std::string& source : sources) tensors.push_back({source, {4}});
  return found(make_plan(fake_catalog(tensors), skeleton_of({target_of(target, {4})})),
               "plan.missing")
      .at(0)
      .suggestion;
}

TEST(MakePlan, SuggestsNoRuleIfNamesFitEquallyWell) {
  EXPECT_EQ(suggestion_for("mid_block.resnets.0.norm1.weight",
                           {"mid.block_1.norm1.weight", "up.block_2.norm1.weight"}),
            "did you mean 'mid.block_1.norm1.weight' or 'up.block_2.norm1.weight'?");
  // Both names need two edits.
  EXPECT_EQ(suggestion_for("blocks.attention.query",
                           {"blocks.attention.queen", "stranger", "blocks.attention.queer"}),
            "did you mean 'blocks.attention.queen' or 'blocks.attention.queer'?");
  EXPECT_THAT(suggestion_for("blocks.attention.query",
                             {"blocks.attention.quer", "stranger", "blocks.attention.qu"}),
              HasSubstr(R"("sources":["blocks\\.attention\\.quer"])"));
  // The names differ only in their numbers, and one has the same numbers as the target.
  EXPECT_THAT(suggestion_for("layers.1.attn.q.bias", {"blocks.0.q.bias", "blocks.1.q.bias"}),
              HasSubstr(R"("sources":["blocks\\.(\\d+)\\.q\\.bias"])"));
  EXPECT_EQ(suggestion_for("layers.2.attn.q.bias", {"blocks.0.q.bias", "blocks.1.q.bias"}),
            "did you mean 'blocks.0.q.bias' or 'blocks.1.q.bias'?");
}

TEST(MakePlan, SuggestsNoRuleForANameThatFitsSeveralTargets) {
  const Plan plan =
      make_plan(fake_catalog({{"final.linear.bias", {4}}}),
                skeleton_of({target_of("a.linear.bias", {4}), target_of("b.linear.bias", {4})}));
  for (const Finding& missing : found(plan, "plan.missing")) {
    EXPECT_EQ(missing.suggestion, "did you mean 'final.linear.bias'?");
  }
}

TEST(MakePlan, SuggestsNoRuleForANameOfADifferentShape) {
  const Plan plan = make_plan(fake_catalog({{"final.linear.bias", {4}}, {"unrelated", {1}}}),
                              skeleton_of({target_of("a.linear.bias", {5})}));
  EXPECT_EQ(found(plan, "plan.missing").at(0).suggestion, "did you mean 'final.linear.bias'?");
}

TEST(MakePlan, AdviceOfTheCallerReplacesSuggestions) {
  PlanOptions options;
  options.caller.missing_advice = "call f()";
  const Plan plan = make_plan(fake_catalog({{"head.wieght", {3}}}),
                              skeleton_of({target_of("head.weight", {3})}), options);
  EXPECT_EQ(found(plan, "plan.missing").at(0).suggestion, "call f()");
}

TEST(MakePlan, AnAdapterInPlaceOfAModelIsOneFinding) {
  const Skeleton model = skeleton_of({target_of("a.weight", {4, 4}), target_of("b", {4})});
  const Plan plan =
      make_plan(fake_catalog({{"a.lora_A.weight", {2, 4}}, {"a.lora_B.weight", {4, 2}}}), model);
  ASSERT_EQ(plan.findings.size(), 1u);
  EXPECT_EQ(plan.findings[0].code, "plan.missing");
  EXPECT_EQ(plan.findings[0].severity, Severity::error);
  EXPECT_THAT(plan.findings[0].message,
              HasSubstr("is a LoRA adapter, not a model: all its 2 tensors are of an adapter, and "
                        "the model lacks 2 values"));
  EXPECT_THAT(plan.findings[0].suggestion, HasSubstr("lora="));
  // The names of a model next to those of an adapter are reported one by one.
  const Plan mixed = make_plan(
      fake_catalog({{"a.lora_A.weight", {2, 4}}, {"a.lora_B.weight", {4, 2}}, {"b", {4}}}), model);
  EXPECT_EQ(mixed.findings.size(), 3u);
}

TEST(MakePlan, OneMissingAndOneUnexpectedArePaired) {
  const Plan plan =
      make_plan(fake_catalog({{"completely.different", {5}}}), skeleton_of({target_of("w", {5})}));
  EXPECT_THAT(found(plan, "plan.missing")[0].suggestion, HasSubstr("'completely.different'"));
}

// ---- shapes and dtypes

TEST(MakePlan, WrongShapeSaysFoundAndExpected) {
  const Plan plan = make_plan(fake_catalog({{"a", {8, 9}}}), skeleton_of({target_of("a", {8, 8})}));
  const auto findings = found(plan, "plan.shape");
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].severity, Severity::error);
  EXPECT_EQ(findings[0].target, "a");
  EXPECT_EQ(findings[0].found, "[8, 9]");
  EXPECT_EQ(findings[0].expected, "[8, 8]");
  EXPECT_TRUE(found(plan, "plan.unexpected").empty());
}

TEST(MakePlan, FloatsAreCastToTheSkeletonInOneFindingAPair) {
  const Plan plan = make_plan(
      fake_catalog({{"a", {2}, Dtype::bf16}, {"b", {2}, Dtype::bf16}, {"c", {2}, Dtype::f16}}),
      skeleton_of({target_of("a", {2}), target_of("b", {2}), target_of("c", {2})}));
  EXPECT_TRUE(plan.ok());
  const auto casts = found(plan, "plan.cast");
  ASSERT_EQ(casts.size(), 2u);
  EXPECT_EQ(casts[0].severity, Severity::info);
  EXPECT_THAT(casts[0].sources, ElementsAre("a", "b"));
  EXPECT_EQ(casts[0].found, "BF16");
  EXPECT_EQ(casts[0].expected, "F32");
}

struct DtypeCase {
  Dtype source;
  Dtype target;
  const char* code;
  Severity severity;
};

class DtypePairs : public testing::TestWithParam<DtypeCase> {};

TEST_P(DtypePairs, AreFoundFor) {
  const DtypeCase& pair = GetParam();
  const Plan plan = make_plan(fake_catalog({{"a", {8}, pair.source}}),
                              skeleton_of({target_of("a", {8}, pair.target)}));
  if (std::string(pair.code).empty()) {
    EXPECT_TRUE(plan.findings.empty());
    return;
  }
  ASSERT_EQ(plan.findings.size(), 1u);
  EXPECT_EQ(plan.findings[0].code, pair.code);
  EXPECT_EQ(plan.findings[0].severity, pair.severity);
  EXPECT_EQ(plan.findings[0].found, name(pair.source));
  EXPECT_EQ(plan.findings[0].expected, name(pair.target));
}

INSTANTIATE_TEST_SUITE_P(
    Each, DtypePairs,
    testing::Values(DtypeCase{Dtype::f32, Dtype::i64, "plan.dtype", Severity::error},
                    DtypeCase{Dtype::i32, Dtype::f32, "plan.dtype", Severity::error},
                    DtypeCase{Dtype::boolean, Dtype::bf16, "plan.dtype", Severity::error},
                    DtypeCase{Dtype::c64, Dtype::f32, "plan.dtype", Severity::error},
                    DtypeCase{Dtype::f32, Dtype::boolean, "plan.dtype", Severity::error},
                    DtypeCase{Dtype::i32, Dtype::i64, "plan.cast", Severity::info},
                    DtypeCase{Dtype::u8, Dtype::i16, "plan.cast", Severity::info},
                    DtypeCase{Dtype::u8, Dtype::i8, "plan.cast", Severity::warning},
                    DtypeCase{Dtype::i64, Dtype::i32, "plan.cast", Severity::warning},
                    DtypeCase{Dtype::i8, Dtype::u64, "plan.cast", Severity::warning},
                    DtypeCase{Dtype::boolean, Dtype::u8, "plan.cast", Severity::info},
                    DtypeCase{Dtype::u8, Dtype::boolean, "plan.cast", Severity::warning},
                    DtypeCase{Dtype::f8_e8m0, Dtype::f32, "plan.cast", Severity::info},
                    DtypeCase{Dtype::f32, Dtype::f8_e8m0, "plan.encoding", Severity::error},
                    DtypeCase{Dtype::f4, Dtype::f32, "plan.encoding", Severity::error},
                    DtypeCase{Dtype::f4, Dtype::f4, "", Severity::info},
                    DtypeCase{Dtype::f6_e2m3, Dtype::f6_e2m3, "", Severity::info},
                    DtypeCase{Dtype::c64, Dtype::c64, "", Severity::info}));

TEST(MakePlan, BlockFormatsAreDecodedOrTakenAsBytes) {
  const auto catalog = fake_catalog({{"a", {2, 256}, BlockFormat::q4_k}, {"b", {4}}});
  const auto kernel_for = [&](const Skeleton& skeleton, const PlanOptions& options = {}) {
    const Plan plan = make_plan(catalog, skeleton, options);
    EXPECT_TRUE(plan.ok()) << to_table(plan);
    const Decoding& decoding = plan.decodings.at(planned(plan, "a").recipe.boxes.at(0).decoding);
    return decoding.kernel + " to " + std::string(name(decoding.dtype));
  };
  EXPECT_EQ(kernel_for(Skeleton::from_catalog(*catalog)), "gguf to F32");
  EXPECT_EQ(kernel_for(Skeleton::from_catalog(*catalog), {.dtype = Dtype::bf16}), "gguf to BF16");
  EXPECT_EQ(kernel_for(skeleton_of({target_of("a", {2, 144}, Dtype::u8)})), "bytes to U8");
  const Plan plan = make_plan(catalog, skeleton_of({target_of("a", {2, 256}, Dtype::i32)}));
  const auto findings = found(plan, "plan.component");
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_THAT(findings[0].message, HasSubstr("Q4_K"));
  EXPECT_EQ(findings[0].target, "a");
}

// Blocks without elements need no decoder.
TEST(MakePlan, BlockFormatsMayBeEmpty) {
  const auto catalog = fake_catalog({{"a", {0, 256}, BlockFormat::q4_k}});
  const Plan plan = make_plan(catalog, Skeleton::from_catalog(*catalog));
  EXPECT_TRUE(plan.ok()) << to_table(plan);
  EXPECT_EQ(planned(plan, "a").recipe.origin, Origin::constant);
}

TEST(MakePlan, HalfBytesAreMovedWholeOrNotAtAll) {
  PlanOptions options;
  options.rules = rules_from_json(
      R"j([{"op": "slice", "sources": ["s"], "targets": ["t"], "dim": 0, "start": 1, "sizes": [2]},
          {"op": "transpose", "sources": ["u"], "targets": ["v"], "dims": [0, 1]}])j");
  const Plan plan = make_plan(
      fake_catalog({{"s", {4}, Dtype::f4}, {"u", {2, 2}, Dtype::f4}, {"w", {4}, Dtype::f4}}),
      skeleton_of({target_of("t", {2}, Dtype::f4), target_of("v", {2, 2}, Dtype::f4),
                   target_of("w", {4}, Dtype::f4)}),
      options);
  const auto findings = found(plan, "plan.encoding");
  ASSERT_EQ(findings.size(), 2u);
  EXPECT_EQ(findings[0].target, "t");
  EXPECT_EQ(findings[1].target, "v");
  EXPECT_EQ(planned(plan, "w").recipe.origin, Origin::checkpoint);
}

TEST(MakePlan, DtypeIsForParametersAndPersistentFloats) {
  const auto skeleton =
      skeleton_of({target_of("p", {2}), target_of("b", {2}, Dtype::f32, persistent),
                   target_of("i", {2}, Dtype::i64, persistent),
                   with_value(target_of("n", {2}, Dtype::f32, non_persistent)),
                   with_value(target_of("x", {2}, Dtype::f64, TargetKind::attribute))});
  const auto catalog = fake_catalog({{"p", {2}}, {"b", {2}}, {"i", {2}, Dtype::i64}});
  PlanOptions options;
  options.dtype = Dtype::bf16;
  const Plan plan = make_plan(catalog, skeleton, options);
  EXPECT_EQ(planned(plan, "p").dtype, Dtype::bf16);
  EXPECT_EQ(planned(plan, "b").dtype, Dtype::bf16);
  EXPECT_EQ(planned(plan, "i").dtype, Dtype::i64);
  EXPECT_EQ(planned(plan, "n").dtype, Dtype::f32);
  EXPECT_EQ(planned(plan, "x").dtype, Dtype::f64);
  EXPECT_EQ(planned(plan, "p").byte_count(), 4u);
}

TEST(MakePlan, DtypeOfTheFile) {
  PlanOptions options;
  options.dtype_from_file = true;
  options.rules =
      rules_from_json(R"j([{"op": "concat", "sources": ["x", "y"], "targets": ["m"], "dim": 0}])j");
  const Plan plan = make_plan(
      fake_catalog({{"p", {2}, Dtype::bf16}, {"x", {1}, Dtype::f16}, {"y", {1}, Dtype::bf16}}),
      skeleton_of({target_of("p", {2}), target_of("m", {2})}), options);
  EXPECT_EQ(planned(plan, "p").dtype, Dtype::bf16);
  EXPECT_EQ(planned(plan, "m").dtype, Dtype::f32);  // the skeleton's dtype wins
  EXPECT_EQ(found(plan, "plan.cast").size(), 2u);
}

// ---- targets without a tensor in the checkpoint

TEST(MakePlan, ConstructorValuesStay) {
  const Plan plan = make_plan(
      fake_catalog({}),
      skeleton_of({with_value(target_of("n", {2}, Dtype::f32, non_persistent)),
                   with_value(target_of("x[0]", {3}, Dtype::f64, TargetKind::attribute))}));
  EXPECT_TRUE(plan.findings.empty());
  EXPECT_EQ(plan.targets[0].recipe.origin, Origin::constructor);
  EXPECT_EQ(plan.targets[1].recipe.origin, Origin::constructor);
  EXPECT_EQ(plan.peak_bytes.at("cpu"), 8u + 24u);  // includes the targets that keep their values
}

TEST(MakePlan, BuffersWithoutAValueAreErrorsForAModelAndExceptionsForAFile) {
  Skeleton skeleton = skeleton_of({target_of("n", {2}, Dtype::f32, non_persistent)});
  const Plan live = make_plan(fake_catalog({}), skeleton);
  ASSERT_EQ(found(live, "plan.no_value").size(), 1u);
  EXPECT_FALSE(live.ok());
  skeleton.values_known = false;
  const Plan file = make_plan(fake_catalog({}), skeleton);
  EXPECT_TRUE(file.ok());
  EXPECT_EQ(file.targets[0].recipe.origin, Origin::excluded);
  EXPECT_THAT(file.targets[0].recipe.reason, HasSubstr("a skeleton file does not contain"));
}

TEST(MakePlan, ANonPersistentBufferInTheFileIsUnexpected) {
  const Plan plan =
      make_plan(fake_catalog({{"n", {2}}}),
                skeleton_of({with_value(target_of("n", {2}, Dtype::f32, non_persistent))}));
  const auto findings = found(plan, "plan.unexpected");
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].target, "n");
  EXPECT_THAT(findings[0].message, HasSubstr("non-persistent"));
  EXPECT_EQ(plan.targets[0].recipe.origin, Origin::constructor);
}

// ---- options, order

TEST(MakePlan, OptionsThatContradictEachOther) {
  const auto catalog = fake_catalog({});
  const auto code = [&](auto change) {
    PlanOptions options;
    change(options);
    return code_of([&] { (void)make_plan(catalog, skeleton_of({}), options); });
  };
  EXPECT_EQ(code([](PlanOptions&) {}), "");
  EXPECT_EQ(code([](PlanOptions& o) { o.dtype = Dtype::i64; }), "plan.options");
  EXPECT_EQ(code([](PlanOptions& o) { o.dtype = Dtype::f4; }), "plan.options");
  EXPECT_EQ(code([](PlanOptions& o) {
              o.dtype = Dtype::f16;
              o.dtype_from_file = true;
            }),
            "plan.options");
  EXPECT_EQ(code([](PlanOptions& o) { o.staging_bytes_max = 0; }), "plan.options");
  EXPECT_EQ(code([](PlanOptions& o) { o.local_ranks = 0; }), "plan.options");
  EXPECT_EQ(code([](PlanOptions& o) { o.max_memory = {{"gpu", 1}}; }), "plan.options");
  EXPECT_EQ(code([](PlanOptions& o) { o.max_memory = {{"0", 1}, {"cuda:0", 1}}; }), "plan.options");
  EXPECT_EQ(code([](PlanOptions& o) {
              o.device_map.mode = DeviceMapMode::automatic;
              o.device_map.entries = {{"", "cpu"}};
            }),
            "plan.options");
  EXPECT_EQ(code([](PlanOptions& o) {
              o.device_map.entries = {{"a", "cpu"}, {"a", "disk"}};
            }),
            "plan.options");
  EXPECT_EQ(code_of([] { (void)make_plan(nullptr, Skeleton()); }), "plan.options");
  Skeleton twice = skeleton_of({target_of("a", {1}), target_of("a", {1})});
  EXPECT_EQ(code_of([&] { (void)make_plan(catalog, twice); }), "skeleton.json");
}

TEST(MakePlan, FindingsAreSortedMostSevereFirst) {
  const Plan plan =
      make_plan(fake_catalog({{"c", {1}, Dtype::f16}, {"z", {1}}}),
                skeleton_of({target_of("b", {1}), target_of("a", {1}), target_of("c", {1})}));
  ASSERT_EQ(plan.findings.size(), 4u);
  EXPECT_EQ(plan.findings[0].target, "a");
  EXPECT_EQ(plan.findings[1].target, "b");
  EXPECT_EQ(plan.findings[2].code, "plan.unexpected");
  EXPECT_EQ(plan.findings[3].code, "plan.cast");
}

TEST(MakePlan, CatalogFindingsAreKept) {
  const auto plain = fake_catalog({{"a", {1}}});
  Finding warning;
  warning.severity = Severity::warning;
  warning.code = "ix.unlisted";
  const auto catalog = std::make_shared<const Catalog>(
      plain->root(), plain->shards(), plain->tensors(), plain->metadata(), std::vector{warning});
  const Plan plan = make_plan(catalog, skeleton_of({target_of("a", {1})}));
  EXPECT_EQ(found(plan, "ix.unlisted").size(), 1u);
}

}  // namespace
}  // namespace loadstone::test
