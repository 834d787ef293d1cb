#include "loadstone/merge.h"

#include <gmock/gmock.h>

#include <cstring>
#include <functional>
#include <limits>
#include <memory>

#include "loadstone/convert.h"
#include "loadstone/error.h"
#include "loadstone/execute.h"
#include "loadstone/quantized_tensors.h"
#include "loadstone/tensor_reader.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/plans.h"
#include "support/random_numbers.h"

namespace loadstone::test {

namespace {

using namespace ::testing;
using Numbers = std::vector<float>;

FileTensor f32(const std::string& name, const std::vector<std::uint64_t>& shape, unsigned seed) {
  const std::uint64_t count = Shape(shape).numel().value();
  return {name, "F32", shape, raw_all(random_numbers(count, seed))};
}

constexpr std::uint64_t rows = 5;
constexpr std::uint64_t columns = 70;
constexpr std::uint64_t rank = 3;

// Creates a base, a second model, and the two matrices of a low-rank product.
class Merges : public ::testing::Test {
 protected:
  Merges() {
    const auto open = [&](const char* file, const std::vector<FileTensor>& tensors) {
      return open_checkpoint(folder_.write(file, safetensors_bytes(tensors)));
    };
    const FileTensor kept = {"k", "I64", {2}, raw_all(std::vector<std::int64_t>{7, 8})};
    parts_ = {
        open("a.safetensors", {f32("w", {rows, columns}, 1), kept}),
        open("b.safetensors", {f32("w", {rows, columns}, 2), kept}),
        open("c.safetensors", {f32("left", {rows, rank}, 3), f32("right", {rank, columns}, 4)})};
    joined_ = std::make_shared<const Catalog>(parts_);
  }

  [[nodiscard]] std::vector<Box> whole(const std::string& name, std::uint32_t checkpoint) const {
    const std::uint32_t source = joined_->find(name, checkpoint).value();
    const std::uint64_t count = joined_->tensors()[source].shape.numel().value();
    return {{.source = source, .dims = {{count, 1, 1}}}};
  }

  // 0.5 * a + 2 * b + 0.25 * (left @ right)
  [[nodiscard]] Merge merge() const {
    Merge merge = {.factor = 0.5F, .row_elements = columns};
    merge.terms.push_back({.factor = 2, .boxes = whole("w", 1), .low_rank = {}});
    merge.terms.push_back({.factor = 0.25F,
                           .boxes = {},
                           .low_rank = LowRank{.rows = rows,
                                               .columns = columns,
                                               .rank = rank,
                                               .left = whole("left", 2),
                                               .right = whole("right", 2),
                                               .magnitudes = {}}});
    return merge;
  }

  [[nodiscard]] Plan plan_of(Merge merge, Dtype dtype = Dtype::f32) const {
    PlanOptions options;
    options.recipes.targets.push_back({.target = "w",
                                       .shape = {rows, columns},
                                       .dtype = dtype,
                                       .boxes = whole("w", 0),
                                       .constant = {},
                                       .merge = std::make_shared<const Merge>(std::move(merge))});
    options.unexpected = UnexpectedPolicy::ignore;
    return make_plan(joined_, skeleton_of({target_of("w", {rows, columns}, dtype)}), options);
  }

  [[nodiscard]] static Numbers expected() {
    const Numbers a = random_numbers(rows * columns, 1);
    const Numbers b = random_numbers(rows * columns, 2);
    const Numbers left = random_numbers(rows * rank, 3);
    const Numbers right = random_numbers(rank * columns, 4);
    Numbers sums;
    for (std::uint64_t i = 0; i < rows; ++i) {
      for (std::uint64_t j = 0; j < columns; ++j) {
        float product = left[i * rank] * right[j];
        for (std::uint64_t k = 1; k < rank; ++k) {
          product = product + left[i * rank + k] * right[k * columns + j];
        }
        const std::uint64_t at = i * columns + j;
        sums.push_back((0.5F * a[at] + 2.0F * b[at]) + 0.25F * product);
      }
    }
    return sums;
  }

  TemporaryFolder folder_;
  std::vector<std::shared_ptr<const Catalog>> parts_;
  std::shared_ptr<const Catalog> joined_;
};

TEST_F(Merges, ACatalogJoinsCheckpointsWhoseNamesAreTheirOwn) {
  EXPECT_THAT(joined_->shards(), SizeIs(3));
  EXPECT_THAT(joined_->tensors(), SizeIs(6));
  EXPECT_EQ(joined_->tensors_of(1).begin, 2u);
  EXPECT_EQ(joined_->tensors_of(1).end, 4u);
  EXPECT_EQ(joined_->tensors_of(9).begin, joined_->tensors_of(9).end);
  const std::uint32_t first = joined_->find("w").value();
  const std::uint32_t second = joined_->find("w", 1).value();
  EXPECT_EQ(joined_->tensors()[first].shard, 0u);
  EXPECT_EQ(joined_->tensors()[second].shard, 1u);
  EXPECT_FALSE(joined_->find("left").has_value());
  EXPECT_FALSE(joined_->find("w", 2).has_value());
  EXPECT_FALSE(joined_->find("w", 3).has_value());
  EXPECT_EQ(parts_[0]->tensors_of(0).end, 2u);
  EXPECT_EQ(Skeleton::from_catalog(*joined_).targets.size(), 2u);
}

TEST_F(Merges, WhatCannotBeJoinedIsRefused) {
  using Parts = std::vector<std::shared_ptr<const Catalog>>;
  for (const Parts& parts : {Parts{}, Parts{nullptr}, Parts{parts_[0], joined_}}) {
    EXPECT_EQ(code_of([&] { const Catalog joined(parts); }), "plan.options");
  }
  EXPECT_EQ(code_of([&] { (void)make_conversion(joined_, {}); }), "plan.options");
}

TEST_F(Merges, QuantizedTensorsOfEachCheckpointAreFound) {
  const auto fp8 = [&](const char* file) {
    return open_checkpoint(
        folder_.write(file, safetensors_bytes({{"q.weight", "F8_E4M3", {4, 4}, some_bytes(16)},
                                               {"q.weight_scale", "F32", {}, raw(0.5F)}})));
  };
  const Catalog joined({parts_[0], fp8("d.safetensors"), fp8("e.safetensors")});
  const auto& quantized = joined.quantized();
  ASSERT_THAT(quantized.tensors(), SizeIs(2));
  EXPECT_EQ(quantized.tensors()[1].data, joined.find("q.weight", 2));
  EXPECT_EQ(quantized.find(joined.find("q.weight", 1).value()), &quantized.tensors()[0]);
  EXPECT_TRUE(quantized.is_companion(joined.find("q.weight_scale", 2).value()));
  EXPECT_EQ(quantized.tensors()[1].decoding.sources[1], joined.find("q.weight_scale", 2));
}

// The first model has GPTQ codes. The second model has scales but no codes.
TEST_F(Merges, ScalesBelongToCodesOfTheirOwnCheckpoint) {
  const auto open = [&](const char* file, const std::vector<FileTensor>& tensors) {
    return open_checkpoint(folder_.write(file, safetensors_bytes(tensors)));
  };
  const auto base = open("f.safetensors", {f32("w", {rows, columns}, 1),
                                           {"m.qweight", "I32", {8, 64}, some_bytes(2048)},
                                           {"m.qzeros", "I32", {2, 8}, std::string(64, '\0')},
                                           {"m.scales", "F16", {2, 64}, std::string(256, '\0')}});
  const auto other = open("g.safetensors", {f32("w", {rows, columns}, 2),
                                            f32("m.weight", {64, 64}, 3),
                                            {"n.scales", "F32", {4}, some_bytes(16)}});
  ASSERT_THAT(base->quantized().tensors(), SizeIs(1));
  ConvertOptions options;
  options.merge = MergeOptions{.weights = {1, 1}};
  const Conversion conversion =
      make_conversion(std::make_shared<const Catalog>(std::vector{base, other}), options);
  EXPECT_THAT(conversion.plan.findings, Each(Field(&Finding::found, Ne("scales without qweight"))));
}

TEST_F(Merges, ALoadComputesThemInThePromisedMemory) {
  const Plan plan = plan_of(merge());
  ASSERT_THAT(plan.findings, IsEmpty());
  for (const unsigned threads : {1u, 3u}) {
    const HostMemory memory(plan);
    const Report report = execute(plan, memory.destinations(), {.threads = threads});
    const Numbers sums = expected();
    EXPECT_EQ(std::memcmp(memory.destinations()[0].data, sums.data(), sums.size() * sizeof(float)),
              0);
    const std::uint64_t value = sums.size() * sizeof(float);
    EXPECT_LE(report.staging_bytes_peak, plan.peak_bytes.at("cpu") - value);
    EXPECT_THAT(report.provenance[0].sources, SizeIs(4));
    EXPECT_EQ(report.bytes_written, value);
  }
}

TEST_F(Merges, AConversionMergesWhatItsOptionsSay) {
  ConvertOptions options;
  options.merge = MergeOptions{.weights = {0.5F, 2}};
  const auto models = std::make_shared<const Catalog>(std::vector{parts_[0], parts_[1]});
  const Conversion conversion = make_conversion(models, options);
  ASSERT_TRUE(conversion.ok());
  const ConvertReport report = convert(conversion, folder_ / "out.safetensors");
  EXPECT_EQ(report.bytes_read, 2 * rows * columns * 4 + 16);
  const auto out = open_checkpoint(folder_ / "out.safetensors");
  const Numbers a = random_numbers(rows * columns, 1);
  const Numbers b = random_numbers(rows * columns, 2);
  const Numbers sums = read_numbers(out, "w");
  for (std::size_t i = 0; i < sums.size(); ++i) EXPECT_EQ(sums[i], 0.5F * a[i] + 2.0F * b[i]);
  EXPECT_EQ(out->tensors()[out->find("k").value()].encoding, Encoding(Dtype::i64));
}

TEST_F(Merges, ItsOptionsAreThoseOfTheCatalog) {
  const auto refused = [&](const MergeOptions& merge) {
    ConvertOptions options;
    options.merge = merge;
    return code_of([&] { (void)make_conversion(joined_, options); });
  };
  EXPECT_EQ(refused({.weights = {1, 1}}), "plan.options");
  EXPECT_EQ(refused({.weights = {}, .adapters = {{}, {}, {}}}), "plan.options");
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(refused({.weights = {nan, 1}, .adapters = {{}}}), "plan.options");
}

// Each change breaks one rule, so plan and engine must reject the merge.
TEST_F(Merges, ThoseThatDoNotFitAreRefusedByPlanAndEngine) {
  using Change = std::function<void(Merge&)>;
  const auto product = [](Merge& merge) -> LowRank& { return *merge.terms[1].low_rank; };
  const std::vector<std::pair<const char*, Change>> changes = {
      {"factor", [](Merge& m) { m.factor = std::numeric_limits<float>::infinity(); }},
      {"terms[0].factor",
       [](Merge& m) { m.terms[0].factor = std::numeric_limits<float>::quiet_NaN(); }},
      {"terms[0].boxes", [](Merge& m) { m.terms[0].boxes.clear(); }},
      {"terms[0].boxes", [](Merge& m) { m.terms[0].boxes[0].source = 99; }},
      {"terms[0].boxes", [](Merge& m) { m.terms[0].boxes[0].decoding = 0; }},
      {"terms[0].boxes", [](Merge& m) { m.terms[0].boxes[0].dims[0].extent += 1; }},
      {"terms[1]", [](Merge& m) { m.row_elements = 0; }},
      {"row_elements", [](Merge& m) { m.row_elements = columns - 1; }},
      // Windows without elements would make the loop endless, even if the merge has no product.
      {"row_elements", [](Merge& m) { m.row_elements = 1ULL << 40, m.terms.pop_back(); }},
      {"terms[1]", [&](Merge& m) { product(m).row_begin = 1; }},
      {"terms[1]", [&](Merge& m) { product(m).row_begin = UINT64_MAX; }},
      {"terms[1]", [&](Merge& m) { product(m).column_begin = 1; }},
      {"terms[1]", [&](Merge& m) { product(m).rank = 0; }},
      {"terms[1]", [&](Merge& m) { product(m).rank = UINT64_MAX / 2; }},
      {"terms[1].left", [&](Merge& m) { product(m).rank = rank + 1; }},
      {"terms[1].left", [&](Merge& m) { product(m).left.clear(); }},
      {"terms[1].right", [&](Merge& m) { product(m).right[0].target_offset = 1; }},
      {"terms[1].magnitudes", [&](Merge& m) { product(m).magnitudes = product(m).left; }},
      {"terms[1]", [](Merge& m) { m.terms[1].boxes = m.terms[0].boxes; }},
      {"terms", [](Merge& m) { std::swap(m.terms[0], m.terms[1]); }},
      {"terms", [](Merge& m) { m.op = MergeOp::slerp, m.terms.erase(m.terms.begin()); }},
      {"terms", [](Merge& m) { m.op = MergeOp::differences, m.terms.erase(m.terms.begin()); }},
      {"density", [](Merge& m) { m.density = 0; }},
      {"density", [](Merge& m) { m.density = std::numeric_limits<double>::quiet_NaN(); }},
      {"form", [](Merge& m) { m.pruning = Pruning::smallest; }},
  };
  const Plan good = plan_of(merge());
  for (const auto& [field, change] : changes) {
    SCOPED_TRACE(field);
    Merge bad = merge();
    change(bad);
    const auto findings = found(plan_of(bad), "plan.box");
    ASSERT_THAT(findings, SizeIs(1));
    EXPECT_THAT(findings[0].message, HasSubstr(std::string(field) + ":"));
    Plan changed = good;
    changed.targets[0].recipe.merge = std::make_shared<const Merge>(bad);
    const HostMemory memory(good);
    // A missing source is detected before the check of merges, when its file is opened.
    EXPECT_THAT(code_of([&] { (void)execute(changed, memory.destinations()); }),
                AnyOf("plan.box", "internal"));
  }
}

// Each thread reserves the largest buffer of each kind, even if different targets need them.
TEST(MergeMemory, IsNoMoreThanThePlanSays) {
  const TemporaryFolder folder;
  const auto catalog = open_checkpoint(folder.write(
      "x.safetensors",
      safetensors_bytes({f32("long", {1, 200'000}, 1), f32("wide", {4, 60'000}, 2),
                         f32("z.left", {4, 16}, 3), f32("z.right", {16, 60'000}, 4)})));
  const auto whole = [&](const std::string& name) -> std::vector<Box> {
    const std::uint32_t source = catalog->find(name).value();
    return {{.source = source, .dims = {{catalog->tensors()[source].shape.numel().value(), 1, 1}}}};
  };
  Merge differences = {.op = MergeOp::differences};
  for (int i = 0; i < 8; ++i) {
    differences.terms.push_back({.factor = 1, .boxes = whole("long"), .low_rank = {}});
  }
  Merge product = {.row_elements = 60'000};
  product.terms.push_back({.factor = 1,
                           .boxes = {},
                           .low_rank = LowRank{.rows = 4,
                                               .columns = 60'000,
                                               .rank = 16,
                                               .left = whole("z.left"),
                                               .right = whole("z.right"),
                                               .magnitudes = {}}});
  PlanOptions options;
  options.unexpected = UnexpectedPolicy::ignore;
  options.staging_bytes_max = 1;
  options.threads = 1;
  const auto add = [&](const std::string& name, Shape shape, Merge merge) {
    options.recipes.targets.push_back({.target = name,
                                       .shape = std::move(shape),
                                       .dtype = Dtype::f32,
                                       .boxes = whole(name),
                                       .constant = {},
                                       .merge = std::make_shared<const Merge>(std::move(merge))});
  };
  add("long", {1, 200'000}, differences);
  add("wide", {4, 60'000}, product);
  const Plan plan = make_plan(catalog,
                              skeleton_of({target_of("long", {1, 200'000}, Dtype::f32),
                                           target_of("wide", {4, 60'000}, Dtype::f32)}),
                              options);
  ASSERT_TRUE(plan.ok());
  const HostMemory memory(plan);
  const Report report = execute(plan, memory.destinations());
  EXPECT_LE(report.staging_bytes_peak + 440'000 * sizeof(float), plan.peak_bytes.at("cpu"));
}

// One non-finite value in an adapter would corrupt a whole row or column of the product.
TEST_F(Merges, AnAdaptersNumbersAreFinite) {
  for (const char* const name : {"left", "right"}) {
    for (const float wrong :
         {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
      Numbers numbers =
          random_numbers(name == std::string("left") ? rows * rank : rank * columns, 5);
      numbers.back() = wrong;
      FileTensor left = f32("left", {rows, rank}, 3);
      FileTensor right = f32("right", {rank, columns}, 4);
      (name == left.name ? left : right).data = raw_all(numbers);
      const auto adapter =
          open_checkpoint(folder_.write("n.safetensors", safetensors_bytes({left, right})));
      joined_ = std::make_shared<const Catalog>(std::vector{parts_[0], parts_[1], adapter});
      const Plan plan = plan_of(merge());
      const HostMemory memory(plan);
      const auto error = error_of([&] { execute(plan, memory.destinations()); });
      ASSERT_TRUE(error);
      EXPECT_EQ(error->code(), "q.nan");
      EXPECT_THAT(error->where().tensor, HasSubstr(name));
    }
  }
}

TEST_F(Merges, CodesAreNoNumbersThere) {
  const auto fp8 = open_checkpoint(folder_.write(
      "q.safetensors", safetensors_bytes({{"w", "F8_E4M3", {rows, columns}, some_bytes(350)},
                                          {"w_scale_inv", "F32", {1, 1}, raw(0.5F)}})));
  joined_ = std::make_shared<const Catalog>(std::vector{parts_[0], fp8});
  Merge bad;
  bad.terms.push_back({.factor = 1, .boxes = whole("w", 1), .low_rank = {}});
  EXPECT_FALSE(plan_of(bad).ok());
}

TEST_F(Merges, AreNoRecipesInFiles) {
  Recipes recipes;
  recipes.targets.push_back({.target = "w",
                             .shape = {rows, columns},
                             .boxes = whole("w", 0),
                             .constant = {},
                             .merge = std::make_shared<const Merge>(merge())});
  EXPECT_EQ(code_of([&] { (void)to_json(recipes, *joined_); }), "plan.recipe");
}

TEST_F(Merges, AreSavedWithTheirPlans) {
  Merge pruned = {.op = MergeOp::differences, .factor = 0.3F};
  pruned.terms.push_back({.factor = 2, .boxes = whole("w", 1), .low_rank = {}});
  pruned.pruning = Pruning::random;
  pruned.density = 0.1;
  pruned.seed = UINT64_MAX;
  pruned.elects_signs = pruned.is_mean = true;
  Merge of_a_tie = pruned;
  of_a_tie.draws_as = "another name";
  Merge arc = {.op = MergeOp::slerp};
  arc.terms.push_back({.factor = 0.1F, .boxes = whole("w", 1), .low_rank = {}});
  Merge scaled = merge();
  scaled.terms[1].low_rank->magnitudes = {
      {.source = joined_->find("left", 2).value(), .dims = {{rows, rank, 1}}}};
  for (const Merge& each : {merge(), pruned, of_a_tie, arc, scaled}) {
    const Plan plan = plan_of(each);
    ASSERT_TRUE(plan.ok());
    const std::string text = to_json(plan);
    const Plan again = plan_from_json(text);
    EXPECT_EQ(*again.targets[0].recipe.merge, each);
    EXPECT_EQ(to_json(again), text);
    const HostMemory memory(plan);
    const HostMemory other(again);
    execute(plan, memory.destinations());
    execute(again, other.destinations());
    EXPECT_EQ(std::memcmp(memory.destinations()[0].data, other.destinations()[0].data,
                          plan.targets[0].byte_count()),
              0);
  }
}

TEST_F(Merges, AreReadWithoutTrust) {
  const std::string text = to_json(plan_of(merge()));
  const auto code = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    const auto at = changed.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    if (at != std::string::npos) changed.replace(at, from.size(), to);
    return code_of([&] { (void)plan_from_json(changed); });
  };
  EXPECT_EQ(code("\"left\": [", "\"left\": [],\"lost\": ["), "plan.json");
  EXPECT_EQ(code("\"checkpoint\": 1", "\"checkpoint\": 3"), "plan.json");
  EXPECT_EQ(code("\"checkpoint\": 1", "\"checkpoint\": 2"), "plan.json");  // lacks the tensor 'w'
  EXPECT_EQ(code("\"checkpoint\": 1", "\"checkpoint\": 4294967296"), "plan.json");
  EXPECT_EQ(code("\"rank\": 3", "\"rank\": 4"), "plan.box");
  EXPECT_EQ(code("\"rank\": 3", "\"rank\": 18446744073709551615"), "plan.box");
  EXPECT_EQ(code("\"rows\": 5", "\"rows\": 6"), "plan.box");
  EXPECT_EQ(code("\"row_begin\": 0", "\"row_begin\": 1"), "plan.box");
  EXPECT_EQ(code("\"row_elements\": 70", "\"row_elements\": 69"), "plan.box");
  EXPECT_EQ(code("\"row_elements\": 70", "\"row_elements\": 0"), "plan.box");
  EXPECT_EQ(code("\"factor_bits\": 1056964608", "\"factor_bits\": 2143289344"), "plan.box");
  EXPECT_EQ(code("\"form\": \"sum\"", "\"form\": \"slurp\""), "plan.json");
  EXPECT_EQ(code("\"form\": \"sum\"", "\"form\": \"differences\""), "plan.json");
  EXPECT_EQ(code("\"source\": 1", "\"source\": 9"), "plan.box");
  EXPECT_EQ(code("\"source\": 3", "\"source\": 2"), "plan.box");  // different extents
  EXPECT_EQ(code("\"other_checkpoints\": [", "\"other_checkpoints\": [1,"), "plan.json");
  EXPECT_EQ(code("c.safetensors\"", "b.safetensors\""), "io.changed");
}

TEST_F(Merges, HaveARootForEachCheckpoint) {
  const std::string text = to_json(plan_of(merge()));
  const auto root = [&](std::size_t part) { return parts_[part]->shards()[0].path; };
  const auto code = [&](std::vector<std::string> others) {
    return code_of([&] {
      (void)plan_from_json(text, {}, {.root = root(0), .other_roots = std::move(others)});
    });
  };
  EXPECT_EQ(code({root(1), root(2)}), "");
  EXPECT_EQ(code({}), "");  // the original files
  EXPECT_EQ(code({root(1), root(2), root(2)}), "plan.options");
}

// Adapters of one base have equal names, shapes and sizes, and so do fine-tuned models. loadstone
// must not confuse their files.
TEST(SavedMerges, TakeNoOtherFileThatStandsBesideThePlan) {
  const TemporaryFolder folder;
  const auto write = [&](const std::string& name, unsigned seed) {
    return folder.write(name, safetensors_bytes({f32("w", {rows, columns}, seed)}));
  };
  const std::string base = write("base/x.safetensors", 1);
  const std::string one = write("one/x.safetensors", 2);
  const std::string two = write("two/x.safetensors", 3);
  const auto joined = std::make_shared<const Catalog>(
      std::vector{open_checkpoint(base), open_checkpoint(one), open_checkpoint(two)});
  Merge sum;
  for (const std::uint32_t each : {1u, 2u}) {
    sum.terms.push_back(
        {.factor = 1,
         .boxes = {{.source = joined->find("w", each).value(), .dims = {{rows * columns, 1, 1}}}},
         .low_rank = {}});
  }
  PlanOptions options;
  options.recipes.targets.push_back(
      {.target = "w",
       .shape = {rows, columns},
       .boxes = {{.source = joined->find("w").value(), .dims = {{rows * columns, 1, 1}}}},
       .constant = {},
       .merge = std::make_shared<const Merge>(sum)});
  const Plan plan =
      make_plan(joined, skeleton_of({target_of("w", {rows, columns}, Dtype::f32)}), options);
  ASSERT_TRUE(plan.ok());
  const HostMemory expected(plan);
  execute(plan, expected.destinations());
  for (const char* const beside : {"base", "one", "two"}) {
    const Plan again = plan_from_json(to_json(plan), {}, {.plan_folder = folder / beside});
    const HostMemory found(again);
    execute(again, found.destinations());
    EXPECT_EQ(std::memcmp(expected.destinations()[0].data, found.destinations()[0].data,
                          rows * columns * sizeof(float)),
              0)
        << beside;
  }
}

}  // namespace

}  // namespace loadstone::test
