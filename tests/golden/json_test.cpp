// JSON of each struct, byte for byte, and the readers' errors for damaged text.
#include <gmock/gmock.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "convert/write/state.h"
#include "golden/json_goldens.h"
#include "loadstone/convert.h"
#include "loadstone/execute.h"
#include "loadstone/merge.h"
#include "loadstone/page.h"
#include "loadstone/quantized_tensors.h"
#include "loadstone/receipt.h"
#include "loadstone/skeleton.h"
#include "loadstone/verify.h"
#include "page/page_data.h"
#include "plan/plan_json.h"
#include "support/errors.h"
#include "support/plans.h"

namespace loadstone::test {
namespace {

constexpr std::uint64_t large = 0xfedcba9876543210u;

std::vector<Finding> some_findings() {
  return {{.severity = Severity::error,
           .code = "plan.missing",
           .target = "a \"quoted\"\n<target>\x7f",
           .sources = {"b", "\\c"},
           .message = "not there",
           .suggestion = "look elsewhere",
           .found = "nothing",
           .expected = "something"},
          {}};
}

Shard shard_of(const std::string& name, const FileIdentity& identity) {
  Shard shard;
  shard.path = "/m/" + name;
  shard.relative_path = name;
  shard.identity = identity;
  shard.header_digest = std::string(32, 'd');
  shard.data_begin = 64;
  return shard;
}

std::shared_ptr<const Catalog> catalog_of(const std::string& root, std::vector<Shard> shards,
                                          const std::vector<FakeTensor>& tensors,
                                          QuantizationClaim claim = {}, Metadata metadata = {},
                                          std::vector<Finding> findings = {}) {
  std::vector<TensorInfo> infos = fake_catalog(tensors)->tensors();
  return std::make_shared<const Catalog>(root, std::move(shards), std::move(infos),
                                         std::move(metadata), std::move(findings), nullptr,
                                         std::move(claim));
}

std::shared_ptr<const Catalog> base_and_adapter() {
  const auto base = catalog_of(
      "/m/base",
      {shard_of("a.safetensors",
                {.bytes = 4096, .modified_ns = -7, .inode = large, .version = "\"etag\""}),
       shard_of("sub/b.safetensors", {.bytes = 64, .modified_ns = 5})},
      {{"a", {2, 3}}, {"q", {4}, Dtype::u8}, {"q.absmax", {}, Dtype::f16}, {"b", {6}, Dtype::bf16}},
      {.is_made = true, .digest = std::string(32, 'c')});
  const auto adapter = catalog_of("/m/adapter", {shard_of("c.safetensors", {.bytes = 1})},
                                  {{"up", {2, 1}}, {"down", {1, 3}}, {"norm", {2}}},
                                  {.digest = std::string(32, 'e')});
  return std::make_shared<const Catalog>(std::vector{base, adapter});
}

Box box_of(std::uint32_t source, std::uint32_t decoding = no_decoding) {
  return {.source = source,
          .source_offset = large,
          .target_offset = 3,
          .dims = {{2, 3, 1}, {3, 1, 2}},
          .decoding = decoding};
}

Quantization some_quantization() {
  return {.encoding = "nf4",
          .dialect = "exact",
          .block_size = 128,
          .nested = true,
          .nested_offset = 0.1f,
          .group = "qkv"};
}

std::shared_ptr<const Merge> some_products() {
  LowRank product = {.row_begin = 1,
                     .column_begin = 2,
                     .rows = 3,
                     .columns = 4,
                     .rank = 5,
                     .left = {box_of(4)},
                     .right = {box_of(5)},
                     .magnitudes = {box_of(6)},
                     .magnitude_columns = 2};
  Term term{.factor = 0.3f, .boxes = {}, .low_rank = product};
  product.magnitudes.clear();
  product.magnitude_columns = 0;
  const Term difference{.factor = 1, .boxes = {box_of(3)}, .low_rank = {}, .is_added = true};
  return std::make_shared<const Merge>(Merge{.op = MergeOp::sum,
                                             .factor = 0.7f,
                                             .terms = {term, {-1, {}, product}, difference},
                                             .row_elements = 3});
}

std::shared_ptr<const Merge> some_differences() {
  return std::make_shared<const Merge>(Merge{.op = MergeOp::differences,
                                             .terms = {{2, {box_of(3), {}}, {}}},
                                             .pruning = Pruning::smallest,
                                             .density = 0.1,
                                             .seed = large,
                                             .draws_as = "d",
                                             .elects_signs = true,
                                             .is_mean = true});
}

// Sources and decodings are numbered in order of use, so the JSON has the same indices.
Plan full_plan() {
  Plan plan;
  plan.catalog = base_and_adapter();
  plan.decodings = {{"nf4", {1, 2}, {8}, Dtype::bf16, 0.25f, 32}, {"other", {2}, {}}};
  PlannedTarget target = {
      .name = "first\\ <name>",
      .kind = TargetKind::persistent_buffer,
      .shape = {2, 3},
      .slice_begin = {1, 0},
      .slice_groups = {2, 1},
      .dtype = Dtype::bf16,
      .device = "cuda:1",
      .delivery = Delivery::memory,
      .recipe = {.origin = Origin::checkpoint, .boxes = {box_of(0), box_of(0, 0), box_of(0, 1)}},
      .quantization = some_quantization()};
  plan.targets.push_back(target);
  target = {.name = "merged", .shape = {}, .device = "disk", .delivery = Delivery::disk_write};
  target.recipe = {.origin = Origin::checkpoint, .boxes = {box_of(3)}, .merge = some_products()};
  plan.targets.push_back(target);
  target.name = "mixed";
  target.kind = TargetKind::attribute;
  target.delivery = Delivery::file_view;
  target.recipe.merge = some_differences();
  target.quantization = Quantization{};
  plan.targets.push_back(target);
  target = {.name = "constant", .shape = {3}, .device = "cpu", .delivery = Delivery::memory};
  target.recipe = {.origin = Origin::constant,
                   .constant = std::make_shared<const std::vector<std::byte>>(5, std::byte{200})};
  plan.targets.push_back(target);
  target.recipe = {.origin = Origin::tie, .tie_of = "constant"};
  plan.targets.push_back(target);
  target.recipe = {.origin = Origin::excluded, .reason = "asked for"};
  plan.targets.push_back(target);
  plan.tie_checks = {{"x", "y", 0, 3, true}, {"z", "y", 1, 0, false}};
  plan.findings = some_findings();
  plan.offload_folder = "/off/load";
  plan.allow_non_finite = true;
  plan.staging_bytes_max = large;
  plan.threads = 7;
  plan.local_ranks = 3;
  plan.bytes_to_read = 11;
  plan.bytes_to_write = 12;
  plan.peak_bytes = {{"cpu", 13}, {"cuda:1", large}};
  plan.device_map = {{"", "cpu"}, {"first", "cuda:1"}};
  return plan;
}

Plan default_plan() {
  Plan plan;
  plan.catalog = catalog_of("", {shard_of("", {})}, {{"a", {}}});
  plan.targets = {{}, {}};
  plan.targets[1].recipe = {.origin = Origin::checkpoint, .boxes = {{}}};
  return plan;
}

// Reads a plan with its catalog and writes it again.
std::string written_again(const std::string& text, const std::shared_ptr<const Catalog>& catalog) {
  SavedPlan saved = read_plan(text);
  Plan plan = std::move(saved.plan);
  plan.catalog = catalog;
  for (SavedTieCheck& each : saved.tie_checks) {
    each.check.taken = catalog->find(each.taken).value();
    each.check.other = catalog->find(each.other).value();
    plan.tie_checks.push_back(each.check);
  }
  return to_json(plan);
}

TEST(JsonGolden, Plan) {
  Plan plan = full_plan();
  const std::string text = to_json(plan);
  expect_golden("plan.json", text);
  EXPECT_EQ(written_again(text, plan.catalog), text);
  const SavedPlan saved = read_plan(text);
  ASSERT_EQ(saved.checkpoints.size(), 2u);
  EXPECT_EQ(saved.checkpoints[0].root, "/m/base");
  EXPECT_EQ(saved.checkpoints[0].config_digest, std::string(32, 'c'));
  EXPECT_EQ(saved.checkpoints[0].shards[0].identity.inode, large);
  EXPECT_EQ(saved.checkpoints[0].shards[0].identity.modified_ns, -7);
  EXPECT_EQ(saved.checkpoints[0].shards[0].identity.version, "\"etag\"");
  EXPECT_EQ(saved.sources.back().checkpoint, 1u);
  EXPECT_EQ(saved.sources[3].encoding, Encoding(Dtype::bf16));
  EXPECT_EQ(*saved.plan.targets[1].recipe.merge, *plan.targets[1].recipe.merge);
  EXPECT_EQ(*saved.plan.targets[2].recipe.merge, *plan.targets[2].recipe.merge);
  EXPECT_EQ(saved.plan.decodings, plan.decodings);
  expect_golden("plan.errors.txt", errors_of(text, "plan.json", [](const auto& changed) {
                  (void)read_plan(changed);
                }));
  // The text omits a numeric importance.
  plan.targets[0].quantization->importance =
      std::make_shared<const std::vector<float>>(std::vector<float>{1, 2});
  const std::string weighed = to_json(plan);
  EXPECT_THAT(weighed, testing::HasSubstr("\"group\": \"qkv\",\"importance\": 2}"));
  const auto error = error_of([&] { (void)read_plan(weighed); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->where().field, "targets[0].quantization.importance");
  EXPECT_EQ(error->message(),
            "a saved plan does not contain an importance matrix: make the plan again");
}

TEST(JsonGolden, PlanOfDefaults) {
  const Plan plan = default_plan();
  const std::string text = to_json(plan);
  expect_golden("plan.defaults.json", text);
  EXPECT_EQ(written_again(text, plan.catalog), text);
}

TEST(JsonGolden, Page) {
  PageOptions options;
  options.max_memory = {{"cuda:1", large}, {"cpu", 1}};
  options.held_bytes = {{"cpu", 2}};
  options.loaded = LoadFigures{};
  options.loaded->progress = {{0, 0}, {0.5, large}};
  Plan plan = full_plan();
  plan.decodings[1].sources = {2, 0};
  for (PlannedTarget& target : plan.targets) {
    if (target.quantization) target.quantization = Quantization{.encoding = "nf4", .dialect = ""};
  }
  plan.targets[0].shape = {2, 64};
  plan.targets[0].slice_begin.clear();
  plan.targets[2].quantization.reset();
  expect_golden("page.json", page_data(plan, options));
  expect_golden("page.defaults.json", page_data(default_plan(), {}));
}

// FP8 with block scales, which the reader checks.
std::shared_ptr<const Catalog> catalog_of_codes(std::vector<Finding> findings = {}) {
  const MetadataValue number = {std::uint64_t{large}, MetadataType::u64};
  return catalog_of("/m", {shard_of("a.safetensors", {.bytes = 9999})},
                    {{"l.weight", {128, 256}, Dtype::f8_e4m3},
                     {"l.weight_scale_inv", {1, 2}},
                     {"plain", {2, 3}, Dtype::i64},
                     {"blocks", {2, 256}, BlockFormat::q4_k}},
                    {}, {{"n", number}, {"t", {std::string("te\nxt"), MetadataType::string}}},
                    std::move(findings));
}

TEST(JsonGolden, Recipes) {
  const auto catalog = catalog_of_codes();
  Recipes recipes;
  recipes.decodings = {catalog->quantized().find(0)->decoding};
  const auto constant = std::make_shared<const std::vector<std::byte>>(8, std::byte{7});
  recipes.targets = {
      {"t\"0", {128, 256}, Dtype::bf16, {{0, 1, 2, {{3, 4, 5}, {6, 7, 8}}, 0}}, {}, {}},
      {"t1", {2, 3}, Dtype::i64, {{2, 0, 0, {}}, {3, large, 1, {{9, 9, 9}}}}, {}, {}},
      {"t2", {2}, Dtype::f32, {}, constant, {}}};
  recipes.computed_from = {2, 0};
  recipes.values_digest = std::string(32, 'f');
  const std::string text = to_json(recipes, *catalog);
  expect_golden("recipes.json", text);
  EXPECT_EQ(to_json(recipes_from_json(*catalog, text), *catalog), text);
  expect_golden("recipes.errors.txt", errors_of(text, "plan.recipe", [&](const auto& changed) {
                  (void)recipes_from_json(*catalog, changed);
                }));
  recipes.decodings[0].group_size = 16;
  recipes.targets[0].boxes[0].decoding = 1;
  recipes.decodings.push_back(recipes.decodings[0]);
  recipes.decodings[1].offset = 0.5;
  recipes.targets[1].boxes[0].decoding = 0;
  expect_golden("recipes.decodings.json", to_json(recipes, *catalog));
}

TEST(JsonGolden, RecipesOfDefaults) {
  const auto catalog = catalog_of_codes();
  const std::string text = to_json(Recipes{}, *catalog);
  expect_golden("recipes.defaults.json", text);
  EXPECT_EQ(to_json(recipes_from_json(*catalog, text), *catalog), text);
}

TEST(JsonGolden, Rules) {
  const Rules rules = {{RuleOp::split, {"a\\.(.*)"}, {"x$1", "y$1"}, {-1}, {2, large}, 0, {}},
                       {RuleOp::stack_concat, {"b(\\d+)", "c(\\d+)"}, {"z"}, {0, 1}, {}, 0, {}},
                       {RuleOp::slice,
                        {"d"},
                        {"e"},
                        {0},
                        {3},
                        4,
                        {{RuleOp::permute, {1, 0}, {}, 0}, {RuleOp::slice, {1}, {2}, 7}, {}}},
                       {RuleOp::rename, {"f"}, {"g"}, {}, {}, 0, {}}};
  const std::string text = rules_to_json(rules);
  expect_golden("rules.json", text);
  EXPECT_EQ(rules_to_json(rules_from_json(text)), text);
  const auto read = [](const auto& changed) { (void)rules_from_json(changed); };
  expect_golden("rules.errors.txt", errors_of(text, "plan.rules", read));
  expect_golden("rules.prefixes.errors.txt",
                errors_of(R"({"old.": "new.", "a": ""})", "plan.rules", read));
  EXPECT_EQ(rules_to_json({}), "[]\n");
}

TEST(JsonGolden, Skeleton) {
  Skeleton skeleton = skeleton_of({target_of("a\"", {4, 6}, Dtype::bf16), target_of("s", {}),
                                   target_of("k", {2}, Dtype::i64, TargetKind::attribute)});
  skeleton.targets[0].slice = Slice{{1, 2}, {2, 3}, {2, 1}};
  skeleton.targets.push_back(target_of("tied", {2}, Dtype::i64));
  skeleton.targets.back().tie_of = "k";
  skeleton.targets.push_back(target_of("part", {4}));
  skeleton.targets.back().slice = Slice{{1}, {2}, {}};
  const std::string text = skeleton.to_json();
  expect_golden("skeleton.json", text);
  EXPECT_EQ(Skeleton::from_json(text).to_json(), text);
  expect_golden("skeleton.errors.txt", errors_of(text, "skeleton.json", [](const auto& changed) {
                  (void)Skeleton::from_json(changed);
                }));
  EXPECT_EQ(Skeleton{}.to_json(), "{\n \"targets\": []\n}\n");
}

Receipt full_receipt() {
  const std::string digest(64, 'a');
  ReceiptTensor tensor = {.name = "t\"",
                          .component = "data",
                          .encoding = "U8",
                          .shape = {2, 3},
                          .begin = 10,
                          .end = 16,
                          .digest = digest,
                          .recipe = "encode",
                          .codec = "nf4",
                          .sources = {"s", "s2"}};
  Receipt receipt = {.kind = DigestKind::sha256_tree, .program = "1.2"};
  ReceiptTensor source = {
      .name = "s", .encoding = "F32", .end = 8, .ranges = {{0, 3}, {4, 8}}, .digest = digest};
  ReceiptTensor other = source;
  other.name = "s2";
  other.ranges.clear();
  receipt.sources = {{.path = "d/a",
                      .bytes = 8,
                      .header_ranges = {},
                      .header_digest = digest,
                      .tensors = {source}},
                     {.path = "b",
                      .checkpoint = 2,
                      .bytes = 20,
                      .header_ranges = {{0, 2}, {19, 20}},
                      .header_digest = digest,
                      .tensors = {other}}};
  receipt.outputs = {{.path = "o",
                      .bytes = 20,
                      .header_ranges = {{0, 10}, {16, 20}},
                      .header_digest = digest,
                      .tensors = {tensor}}};
  receipt.targets = {tensor};
  receipt.targets[0].begin = 0;
  return receipt;
}

TEST(JsonGolden, Receipt) {
  Receipt receipt = full_receipt();
  receipt.targets[0].end = 6;
  const std::string text = to_json(receipt);
  expect_golden("receipt.json", text);
  EXPECT_EQ(receipt_from_json(text), receipt);
  EXPECT_EQ(to_json(receipt_from_json(text)), text);
  expect_golden("receipt.errors.txt", errors_of(text, "receipt.json", [](const auto& changed) {
                  (void)receipt_from_json(changed);
                }));
  const std::string bare = to_json(Receipt{});
  expect_golden("receipt.defaults.json", bare);
  EXPECT_EQ(receipt_from_json(bare), Receipt{});
}

TEST(JsonGolden, WorkState) {
  const WorkState state = {.program = "1.2",
                           .parts = 3,
                           .stem = "m",
                           .sources = {{"a", large, -3, 5, "v", "h"}, {}},
                           .has_copies = true,
                           .metadata = "m1",
                           .tensors = "t1",
                           .values = "v1",
                           .files = "f1",
                           .extras = "e1",
                           .extra_names = {"x", "y"}};
  const std::string text = to_json(state);
  expect_golden("work_state.json", text);
  EXPECT_EQ(to_json(work_state_from_json(text)), text);
  expect_golden("work_state.errors.txt", errors_of(text, "convert.state", [](const auto& changed) {
                  (void)work_state_from_json(changed);
                }));
  expect_golden("work_state.defaults.json", to_json(WorkState{}));
}

TEST(JsonGolden, LoadReport) {
  Report report;
  report.provenance = {{.target = "a\"",
                        .origin = Origin::checkpoint,
                        .kind = TargetKind::attribute,
                        .delivery = Delivery::disk_keep,
                        .sources = {{"s", "shard", 1, large}, {"u", "shard2", 2, 3}},
                        .merged = {"/m/adapter"},
                        .device = "cuda:0",
                        .dtype = Dtype::bf16,
                        .shape = {2, 3},
                        .encoding = "nf4",
                        .tie_of = "b",
                        .reason = "offloaded",
                        .bytes_written = 12},
                       {}};
  report.findings = some_findings();
  report.seconds = 0.125;
  report.bytes_read = 1;
  report.bytes_written = 2;
  report.bytes_read_ahead = large;
  report.staging_bytes_peak = 4;
  report.readers = 5;
  report.is_interleaved = true;
  report.sync_seconds = 1e-9;
  expect_golden("load_report.json", to_json(report));
  expect_golden("load_report.defaults.json", to_json(Report{}));
}

TEST(JsonGolden, ConvertReport) {
  ConvertReport report;
  report.outputs = {"/o/a", "/o/b\""};
  report.findings = some_findings();
  report.seconds = 1234.5678;
  report.sync_seconds = 3;
  report.bytes_read = 1;
  report.bytes_written = 2;
  report.bytes_read_ahead = large;
  report.bytes_kept = 4;
  report.bytes_checked = 6;
  report.peak_bytes = 5;
  report.page_cache = PageCache::release;
  expect_golden("convert_report.json", to_json(report));
  expect_golden("convert_report.defaults.json", to_json(ConvertReport{}));
}

TEST(JsonGolden, Conversion) {
  Conversion conversion;
  conversion.plan.catalog = catalog_of_codes();
  conversion.plan.findings = some_findings();
  const auto add = [&](const std::string& name, Shape shape, std::vector<Box> boxes) {
    PlannedTarget target;
    target.name = name;
    target.shape = std::move(shape);
    target.recipe = {.origin = Origin::checkpoint, .boxes = std::move(boxes)};
    conversion.plan.targets.push_back(std::move(target));
  };
  add("plain\"", {2, 3}, {{2, 0, 0, {{6, 1, 1}}}, {3, 0, 0, {}}});
  add("blocks", {2, 256}, {{3, 0, 0, {{512, 1, 1}}}});
  add("codes", {64}, {{2, 0, 0, {}}});
  conversion.plan.targets.back().quantization = Quantization{.encoding = "nf4", .dialect = ""};
  add("moved", {3}, {});
  conversion.format = FileFormat::gguf;
  conversion.files = {{"f1", {{}, {}}, 10, 20}, {}};
  conversion.metadata = conversion.plan.catalog->metadata();
  conversion.quantize_rows = {
      {"n*", "[2]", "BF16", "nf4", "no reason", Fidelity::lossy, 0.125, 3, 4, large}, {}};
  conversion.repacked = {{"l.1.w", {4}, some_quantization(), {"moved"}},
                         {"l.2.w", {4}, some_quantization(), {}}};
  conversion.budget.threads = 6;
  conversion.bytes_to_read = 7;
  conversion.bytes_to_write = 8;
  conversion.peak_bytes = large;
  expect_golden("conversion.json", to_json(conversion));
  expect_golden("conversion.txt", to_table(conversion, true));
  expect_golden("conversion.defaults.json", to_json(Conversion{}));
}

TEST(JsonGolden, VerifyReport) {
  const VerifyReport report = {
      .not_finite = {{"n", 1, large}, {}},
      .findings = some_findings(),
      .quantized = {{"q", "nvfp4", 0.015625, 0.5}, {}},
      .widened = {{"w", "F32", "BF16"}, {}},
      .rounded = {{"r", "BF16", "F32"}},
      .differences = {{"d", DifferenceKind::values, "f", "e", false, ErrorSize{0.5, 0.125}}, {}},
      .bytes_read = large};
  expect_golden("verify_report.json", to_json(report));
  expect_golden("verify_report.txt", to_table(report));
  expect_golden("verify_report.defaults.json", to_json(VerifyReport{}));
}

TEST(JsonGolden, Catalog) {
  expect_golden("catalog.json", to_json(*catalog_of_codes(some_findings())));
  expect_golden("catalog.defaults.json", to_json(Catalog("", {}, {}, {}, {})));
  std::vector<TensorInfo> infos = fake_catalog({{"v", {2, 3}}})->tensors();
  infos[0].strides = {1, 2};
  const Catalog strided("", {shard_of("a", {})}, infos, {}, {});
  expect_golden("catalog.strides.json", to_json(strided));
}

}  // namespace
}  // namespace loadstone::test
