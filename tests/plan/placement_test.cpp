// Tests device maps, deliveries and memory budgets.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include "loadstone/plan.h"
#include "plan/balance.h"
#include "plan/devices.h"
#include "support/errors.h"
#include "support/plans.h"

namespace loadstone::test {
namespace {

using namespace ::testing;

using Entries = std::vector<std::pair<std::string, std::string>>;

// Returns modules: layers of 100 bytes, an embedding of 50 bytes that is tied to the head, and a
// norm of 10 bytes.
std::vector<Placeable> small_model(std::size_t layers) {
  static std::vector<std::string> names;
  names.clear();
  names.reserve(2 * layers + 4);
  std::vector<Placeable> tensors;
  const auto add = [&](std::string name, std::uint64_t bytes) {
    names.push_back(std::move(name));
    tensors.push_back({names.back(), bytes, tensors.size()});
  };
  add("embed.weight", 50);
  for (std::size_t i = 0; i < layers; ++i) {
    add(fmt::format("layers.{}.a.weight", i), 60);
    add(fmt::format("layers.{}.b.weight", i), 40);
  }
  add("norm.weight", 10);
  add("head.weight", 50);
  tensors.back().root = 0;
  return tensors;
}

Entries mapped(const std::vector<Placeable>& tensors, DeviceMapMode mode, Capacities capacities,
               const std::vector<std::string>& no_split = {}) {
  return device_map_entries(tensors,
                            balanced_devices(tensors, mode, std::move(capacities), no_split));
}

std::vector<std::string> layers_of(std::size_t count) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < count; ++i) names.push_back(fmt::format("layers.{}", i));
  return names;
}

TEST(Balance, WithoutCapacitiesAllIsOnTheHost) {
  EXPECT_THAT(mapped(small_model(4), DeviceMapMode::automatic, {}), ElementsAre(Pair("", "cpu")));
}

TEST(Balance, NumberedModulesAreWholeIfTheyFit) {
  const Capacities small = {{"cpu", 199}, {"disk", 10'000}};
  EXPECT_THAT(numbered_modules(small_model(2), {{"cpu", 200}}),
              UnorderedElementsAre("layers.0", "layers.1"));
  EXPECT_THAT(numbered_modules(small_model(2), small), IsEmpty());
  EXPECT_THAT(numbered_modules(small_model(2), {}), SizeIs(2));
  const std::vector<std::string> names = {"blocks.0.experts.0.w", "blocks.0.experts.1.w", "0.w"};
  const std::vector<Placeable> nested = {{names[0], 80, 0}, {names[1], 80, 1}, {names[2], 1, 2}};
  EXPECT_THAT(numbered_modules(nested, {{"cpu", 1000}}), UnorderedElementsAre("blocks.0", "0"));
  EXPECT_THAT(numbered_modules(nested, {{"cpu", 160}}),
              UnorderedElementsAre("blocks.0.experts.0", "blocks.0.experts.1", "0"));
}

TEST(Placement, ComputedMapsDoNotSplitLayersByDefault) {
  Skeleton model;
  std::vector<FakeTensor> tensors;
  for (const char* const layer : {"layers.0", "layers.1", "layers.2"}) {
    for (const char* const name : {".a.w", ".b.w"}) {
      model.targets.push_back(target_of(std::string(layer) + name, {10}));
      tensors.push_back({std::string(layer) + name, {10}});
    }
  }
  const auto catalog = fake_catalog(tensors);
  PlanOptions options;
  options.device_map.mode = DeviceMapMode::automatic;
  options.max_memory = {{"cpu", 200}};
  // 80 bytes are reserved for the largest layer.
  EXPECT_THAT(make_plan(catalog, model, options).device_map, Contains(Pair("layers.1", "disk")));
  options.no_split_modules.emplace();
  EXPECT_THAT(make_plan(catalog, model, options).device_map, Contains(Pair("layers.1", "cpu")));
}

TEST(Balance, SequentialFillsOneDeviceAfterTheOther) {
  // 100 bytes of cuda:0 are reserved for the largest layer. The other 250 bytes fit the embedding,
  // the tied head and two layers.
  EXPECT_THAT(
      mapped(small_model(4), DeviceMapMode::sequential, {{"cuda:0", 350}, {"cuda:1", 1000}},
             layers_of(4)),
      ElementsAre(Pair("embed", "cuda:0"), Pair("layers.0", "cuda:0"), Pair("layers.1", "cuda:0"),
                  Pair("layers.2", "cuda:1"), Pair("layers.3", "cuda:1"), Pair("norm", "cuda:1"),
                  Pair("head", "cuda:0")));
}

TEST(Balance, OverflowGoesToTheHostThenToDisk) {
  const auto entries = mapped(small_model(4), DeviceMapMode::sequential,
                              {{"cuda:0", 250}, {"cpu", 200}}, layers_of(4));
  EXPECT_THAT(entries,
              ElementsAre(Pair("embed", "cuda:0"), Pair("layers.0", "cuda:0"),
                          Pair("layers.1", "cpu"), Pair("layers.2", "disk"),
                          Pair("layers.3", "disk"), Pair("norm", "disk"), Pair("head", "cuda:0")));
}

TEST(Balance, ModulesThatMayBeSplitAre) {
  // 60 bytes are reserved for the largest layer.
  const auto split = mapped(small_model(2), DeviceMapMode::sequential,
                            {{"cuda:0", 50 + 60 + 60}, {"cpu", 10'000}});
  EXPECT_THAT(split, ElementsAre(Pair("embed", "cuda:0"), Pair("layers.0.a", "cuda:0"),
                                 Pair("layers.0.b", "cpu"), Pair("layers.1", "cpu"),
                                 Pair("norm", "cpu"), Pair("head", "cuda:0")));
}

TEST(Balance, BalancedSharesOutEvenly) {
  const auto tensors = small_model(8);  // 860 bytes
  const auto devices = balanced_devices(tensors, DeviceMapMode::balanced,
                                        {{"cuda:0", 10'000}, {"cuda:1", 10'000}}, layers_of(8));
  std::map<std::string, std::uint64_t> used;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].root == i) used[devices[i]] += tensors[i].bytes;
  }
  EXPECT_EQ(used.size(), 2u);
  EXPECT_NEAR(static_cast<double>(used["cuda:0"]), 430, 100);
  EXPECT_EQ(mapped(tensors, DeviceMapMode::balanced, {{"cuda:0", 10'000}, {"cuda:1", 10'000}},
                   layers_of(8)),
            mapped(tensors, DeviceMapMode::automatic, {{"cuda:0", 10'000}, {"cuda:1", 10'000}},
                   layers_of(8)));
}

TEST(Balance, LowZeroKeepsTheFirstFree) {
  const auto tensors = small_model(8);
  const auto devices =
      balanced_devices(tensors, DeviceMapMode::balanced_low_0,
                       {{"cuda:0", 10'000}, {"cuda:1", 10'000}, {"cuda:2", 10'000}}, layers_of(8));
  std::uint64_t first = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].root == i && devices[i] == "cuda:0") first += tensors[i].bytes;
  }
  EXPECT_EQ(first, 0u);
}

TEST(Balance, TiesAreTogetherAndCountOnce) {
  const auto tensors = small_model(1);
  const auto devices = balanced_devices(tensors, DeviceMapMode::sequential,
                                        {{"cuda:0", 50 + 100}, {"cpu", 10'000}}, layers_of(1));
  EXPECT_EQ(devices.front(), "cuda:0");
  EXPECT_EQ(devices.back(), "cuda:0");
}

TEST(Balance, AllModulesOfATieAreTogether) {
  std::vector<Placeable> tensors = small_model(1);
  for (const char* name : {"head.bias", "other.weight", "other.bias"}) {
    tensors.push_back({name, 10, tensors.size()});
  }
  tensors[tensors.size() - 2].root = 0;
  // cuda:0 has memory for the embedding and both heads, but not for the layer.
  const auto devices = balanced_devices(tensors, DeviceMapMode::sequential,
                                        {{"cuda:0", 70 + 100}, {"cpu", 10'000}}, layers_of(1));
  EXPECT_EQ(devices[1], "cpu");
  for (const std::size_t i : {tensors.size() - 3, tensors.size() - 1}) {
    EXPECT_EQ(devices[i], "cuda:0") << tensors[i].name;
  }
}

TEST(Paths, DotsAndBracketsEndThem) {
  EXPECT_TRUE(is_path_of("", "a"));
  EXPECT_TRUE(is_path_of("a", "a"));
  EXPECT_TRUE(is_path_of("a", "a.b"));
  EXPECT_TRUE(is_path_of("a.b", "a.b[0]"));
  EXPECT_FALSE(is_path_of("a", "ab"));
  EXPECT_FALSE(is_path_of("a.b", "a"));
}

TEST(Devices, Names) {
  for (const char* name : {"cpu", "disk", "meta", "mps", "mps:0", "cuda", "cuda:0", "xpu:12"}) {
    EXPECT_TRUE(is_device_name(name)) << name;
  }
  for (const char* name :
       {"", "gpu", "cuda:", "cuda:x", "cuda:00000", "cpu:0 ", "CPU", "cuda:-1"}) {
    EXPECT_FALSE(is_device_name(name)) << name;
  }
  EXPECT_EQ(device_name("3"), "cuda:3");
  EXPECT_EQ(device_name("cpu"), "cpu");
}

TEST(Devices, OffloadNames) {
  EXPECT_TRUE(is_offload_name("model.layers.0.w"));
  for (const std::string& name :
       {std::string(), std::string("a/b"), std::string(".."), std::string("a\0b", 3),
        std::string(252, 'x'), std::string("a\nb"), std::string("a\\b")}) {
    EXPECT_FALSE(is_offload_name(name)) << name;
  }
}

// ---- in plans

const Skeleton two = skeleton_of({target_of("a.w", {4}), target_of("b.c.w", {8}, Dtype::f16)});

std::shared_ptr<const Catalog> two_sources() {
  return fake_catalog({{"a.w", {4}}, {"b.c.w", {8}}});
}

Plan planned_on(Entries entries, PlanOptions options = {}) {
  options.device_map.entries = std::move(entries);
  return make_plan(two_sources(), two, options);
}

TEST(Placement, TheLongestEntryWins) {
  const Plan plan = planned_on({{"", "cpu"}, {"b", "1"}, {"b.c", "cuda:2"}});
  EXPECT_EQ(plan.targets[0].device, "cpu");
  EXPECT_EQ(plan.targets[1].device, "cuda:2");
  EXPECT_EQ(plan.targets[1].delivery, Delivery::memory);
  EXPECT_EQ(plan.peak_bytes.at("cuda:2"), 16u);
  const auto findings = found(plan, "plan.device_map");  // entry "b" places no tensor
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].severity, Severity::warning);
  EXPECT_THAT(plan.device_map,
              ElementsAre(Pair("", "cpu"), Pair("b", "cuda:1"), Pair("b.c", "cuda:2")));
}

TEST(Placement, UncoveredAndUnknown) {
  const Plan uncovered = planned_on({{"a", "cpu"}});
  EXPECT_FALSE(uncovered.ok());
  EXPECT_EQ(found(uncovered, "plan.device_map")[0].target, "b.c.w");
  const Plan unknown = planned_on({{"", "gpu"}});
  EXPECT_FALSE(unknown.ok());
  EXPECT_THAT(found(unknown, "plan.device_map")[0].message, HasSubstr("'gpu'"));
}

TEST(Placement, AnEntryThatNamesNothingIsAnError) {
  const Entries mistyped = {{"", "cpu"}, {"bb", "1"}};
  const Plan plan = planned_on(mistyped);
  EXPECT_FALSE(plan.ok());
  const auto findings = found(plan, "plan.device_map");
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_THAT(findings[0].message, HasSubstr("'bb'"));
  PlanOptions options;
  options.device_map.allows_unknown = true;
  EXPECT_EQ(found(planned_on(mistyped, options), "plan.device_map")[0].severity, Severity::warning);
  options = {};
  options.device_map.bare_modules = {"bb"};
  EXPECT_THAT(found(planned_on(mistyped, options), "plan.device_map"), IsEmpty());
}

TEST(Placement, MetaIsAnExceptionWithAReason) {
  const Plan plan = planned_on({{"", "cpu"}, {"b", "meta"}});
  EXPECT_TRUE(plan.ok());
  EXPECT_EQ(plan.targets[1].recipe.origin, Origin::excluded);
  EXPECT_THAT(plan.targets[1].recipe.reason, HasSubstr("device map"));
  EXPECT_TRUE(plan.targets[1].recipe.boxes.empty());
  EXPECT_EQ(plan.bytes_to_read, 16u);
}

TEST(Placement, DiskKeepsWhatItCanAndWritesTheRest) {
  const auto catalog = fake_catalog({{"same", {4}},
                                     {"wider", {4}, Dtype::bf16},
                                     {"narrower", {4}, Dtype::f64},
                                     {"number", {4}, Dtype::u8},
                                     {"shape", {2, 2}},
                                     {"flipped", {2, 2}}});
  const Skeleton skeleton =
      skeleton_of({target_of("same", {4}), target_of("wider", {4}), target_of("narrower", {4}),
                   target_of("number", {4}, Dtype::i64), target_of("shape", {4}),
                   target_of("flipped", {2, 2}), target_of("gone", {4})});
  PlanOptions options;
  options.device_map.entries = {{"", "disk"}};
  options.missing = MissingPolicy::zeros;
  options.rules = rules_from_json(R"j([
      {"op": "reshape", "sources": ["shape"], "targets": ["shape"], "sizes": [4]},
      {"op": "transpose", "sources": ["flipped"], "targets": ["flipped"], "dims": [0, 1]}])j");
  options.offload_folder = "/tmp/offload";
  const Plan plan = make_plan(catalog, skeleton, options);
  EXPECT_TRUE(plan.ok());
  // The reader of an offload folder can cast floats. Shapes and integers must match the file.
  for (const char* const kept : {"same", "wider", "narrower"}) {
    EXPECT_EQ(planned(plan, kept).delivery, Delivery::disk_keep) << kept;
  }
  for (const char* const written : {"number", "shape", "flipped", "gone"}) {
    EXPECT_EQ(planned(plan, written).delivery, Delivery::disk_write) << written;
  }
  EXPECT_EQ(plan.bytes_to_write, 32u + 16 + 16 + 16);
  EXPECT_EQ(plan.bytes_to_read, 4u + 16 + 16);
  EXPECT_EQ(plan.peak_bytes.at("disk"), plan.bytes_to_write);
  options.offload_folder.clear();
  const Plan homeless = make_plan(catalog, skeleton, options);
  ASSERT_EQ(found(homeless, "plan.offload_folder").size(), 1u);
  EXPECT_THAT(found(homeless, "plan.offload_folder")[0].message, HasSubstr("4 targets"));
  EXPECT_FALSE(homeless.ok());
}

TEST(Placement, WhereNothingIsWrittenNoFolderIsNeeded) {
  const Plan plan = planned_on({{"", "disk"}});
  EXPECT_TRUE(plan.ok());
  EXPECT_EQ(plan.targets[0].delivery, Delivery::disk_keep);
  EXPECT_EQ(plan.targets[1].delivery, Delivery::disk_keep);
  EXPECT_EQ(plan.bytes_to_write, 0u);
  EXPECT_EQ(plan.bytes_to_read, 0u);
}

TEST(Placement, WithoutAMapWhereTheModelHoldsIt) {
  Target held = target_of("held", {4});
  held.held = Held{.device = "cuda:1"};
  Target tied = target_of("tied", {4});
  tied.tie_of = "held";
  const auto catalog = fake_catalog({{"held", {4}}, {"blank", {4}}});
  const auto skeleton = skeleton_of({held, tied, target_of("blank", {4})});
  const Plan plan = make_plan(catalog, skeleton);
  EXPECT_EQ(planned(plan, "held").device, "cuda:1");
  EXPECT_EQ(planned(plan, "tied").device, "cuda:1");
  EXPECT_EQ(planned(plan, "blank").device, "cpu");
  EXPECT_EQ(plan.peak_bytes.at("cuda:1"), 16u);
  EXPECT_TRUE(plan.device_map.empty());
  PlanOptions options;
  options.device_map.entries = {{"", "cpu"}};
  EXPECT_EQ(planned(make_plan(catalog, skeleton, options), "held").device, "cpu");
  held.held = Held{.device = "gpu:0"};
  const Plan unknown = make_plan(fake_catalog({{"held", {4}}}), skeleton_of({held}));
  EXPECT_FALSE(unknown.ok());
  EXPECT_EQ(found(unknown, "plan.device_map").size(), 1u);
}

TEST(Placement, NamesThatAreNoFilesStayOffTheDisk) {
  PlanOptions options;
  options.offload_folder = "/tmp/offload";
  options.device_map.entries = {{"", "disk"}};
  options.missing = MissingPolicy::zeros;
  const Plan plan =
      make_plan(fake_catalog({{"../kept", {4}}}),
                skeleton_of({target_of("../x", {4}), target_of("../kept", {4})}), options);
  EXPECT_EQ(found(plan, "offload.name").size(), 1u);
  EXPECT_FALSE(plan.ok());
}

TEST(Placement, ValuesOfTheCallersStayOffTheDisk) {
  PlanOptions options;
  options.offload_folder = "/tmp/offload";
  options.device_map.entries = {{"", "disk"}};
  options.missing = MissingPolicy::initialise;
  Target buffer = target_of("n", {2}, Dtype::f32, TargetKind::non_persistent_buffer);
  buffer.has_value = true;
  const Plan plan =
      make_plan(fake_catalog({}), skeleton_of({buffer, target_of("p", {3})}), options);
  EXPECT_TRUE(plan.ok());
  EXPECT_EQ(plan.targets[0].device, "cpu");
  EXPECT_EQ(plan.targets[1].device, "cpu");
  EXPECT_EQ(plan.peak_bytes.at("cpu"), 8u + 12u);
}

TEST(Placement, ViewsOfTheFileWhereNothingChanges) {
  PlanOptions options;
  options.mmap = true;
  const Plan plan = make_plan(
      fake_catalog({{"a", {4}}, {"odd", {1}, Dtype::u8}, {"b", {4}}, {"c", {4}, Dtype::bf16}}),
      skeleton_of({target_of("a", {4}), target_of("odd", {1}, Dtype::u8), target_of("b", {4}),
                   target_of("c", {4})}),
      options);
  EXPECT_EQ(planned(plan, "a").delivery, Delivery::file_view);
  EXPECT_EQ(planned(plan, "odd").delivery, Delivery::file_view);
  EXPECT_EQ(planned(plan, "b").delivery, Delivery::memory);  // not aligned in the file
  EXPECT_EQ(planned(plan, "c").delivery, Delivery::memory);  // needs a cast
  const auto findings = found(plan, "plan.mmap");
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].severity, Severity::info);
  EXPECT_THAT(findings[0].sources, ElementsAre("b"));
  EXPECT_EQ(plan.bytes_to_read, 16u + 8u);
}

TEST(Placement, BudgetsAreChecked) {
  PlanOptions options;
  options.max_memory = {{"cpu", 31}};
  // The targets need 16 + 16 bytes, and a cast needs 32 bytes of staging.
  const Plan over = make_plan(two_sources(), two, options);
  ASSERT_EQ(found(over, "plan.over_budget").size(), 1u);
  EXPECT_EQ(over.peak_bytes.at("cpu"), 64u);
  EXPECT_FALSE(over.ok());
  EXPECT_EQ(exit_status(over.findings[0].code), 5);
  options.max_memory = {{"cpu", over.peak_bytes.at("cpu")}};
  EXPECT_TRUE(make_plan(two_sources(), two, options).ok());
  options.max_memory = {{"cpu", over.peak_bytes.at("cpu") - 1}};
  EXPECT_FALSE(make_plan(two_sources(), two, options).ok());
}

TEST(Placement, ComputedMapsUseFinalSizes) {
  PlanOptions options;
  options.device_map.mode = DeviceMapMode::sequential;
  options.dtype = Dtype::f16;
  options.max_memory = {{"cuda:0", 8 + 16 + 16}, {"cpu", 1000}};
  const Plan plan = make_plan(two_sources(), two, options);
  EXPECT_TRUE(plan.ok());
  EXPECT_THAT(plan.device_map, ElementsAre(Pair("", "cuda:0")));
  options.dtype = Dtype::f32;
  const Plan larger = make_plan(two_sources(), two, options);
  EXPECT_THAT(larger.device_map, ElementsAre(Pair("", "cpu")));
}

TEST(Placement, StagingIsCountedWhereItIsNeeded) {
  const auto catalog = fake_catalog({{"a", {4096}}});
  const Plan direct = make_plan(catalog, skeleton_of({target_of("a", {4096})}));
  EXPECT_EQ(direct.peak_bytes.at("cpu"), 16384u);
  PlanOptions options;
  options.staging_bytes_max = 5000;
  const Plan cast = make_plan(catalog, skeleton_of({target_of("a", {4096}, Dtype::f64)}), options);
  EXPECT_EQ(cast.peak_bytes.at("cpu"), 32768u + 5000u);
}

}  // namespace
}  // namespace loadstone::test
