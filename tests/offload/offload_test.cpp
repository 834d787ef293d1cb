// Tests the offload folder: its layout, and that a failed load leaves it unchanged. Uses real
// folders, and a full disk if the system permits a small mount.
#include "offload/offload.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "loadstone/error.h"
#include "loadstone/execute.h"
#include "offload/offload_folder.h"
#include "support/offload_values.h"
#include "support/plan_builder.h"

namespace loadstone::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A temporary folder, removed on destruction.
class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "loadstone-offload-XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  ~Folder() { fs::remove_all(path_); }
  [[nodiscard]] fs::path path() const { return path_; }
  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(path_)) {
      names.push_back(entry.path().filename().string());
    }
    std::ranges::sort(names);
    return names;
  }

 private:
  fs::path path_;
};

std::string text_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_text(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// Names of the data files in the folder.
std::vector<std::string> data_files(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("loadstone-")) names.push_back(name);
  }
  std::ranges::sort(names);
  return names;
}

// Returns a plan with three tensors. A load writes two of them and leaves one in its shard.
Plan offload_plan(PlanBuilder& builder, const fs::path& folder) {
  builder.add_plain("layer.weight", Dtype::f32, Dtype::bf16, {30, 40}, pattern(4800, 1)).delivery =
      Delivery::disk_write;
  builder.add_plain("scale", Dtype::f32, Dtype::f32, {}, pattern(4, 2)).delivery =
      Delivery::disk_write;
  builder.add_plain("kept", Dtype::bf16, Dtype::bf16, {5}, pattern(10, 3)).delivery =
      Delivery::disk_keep;
  builder.add_plain("in_memory", Dtype::u8, Dtype::u8, {5}, pattern(5, 4));
  Plan plan = builder.build();
  plan.offload_folder = folder.string();
  return plan;
}

Report load(PlanBuilder& builder, const Plan& plan) {
  const HostMemory memory(plan);
  return execute(plan, memory.destinations(), {.storage = &builder.storage});
}

Error load_error(PlanBuilder& builder, const Plan& plan) {
  try {
    load(builder, plan);
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error was thrown";
  return Error("none", "none");
}

TEST(OffloadTest, WritesTheLayoutOfAccelerate) {
  const Folder folder;
  PlanBuilder builder;
  const Plan plan = offload_plan(builder, folder.path() / "new" / "folder");
  const Report report = load(builder, plan);
  const fs::path made = folder.path() / "new" / "folder";
  const auto values = offload_values(made);
  EXPECT_EQ(values.at("layer.weight"), expected_value(builder, plan.targets[0]));
  EXPECT_EQ(values.at("scale"), expected_value(builder, plan.targets[1]));
  EXPECT_EQ(values.size(), 2u);
  const std::string file = data_files(made).at(0);
  std::string index = text_of(made / "index.json");
  for (std::size_t at = index.find(file); at != index.npos; at = index.find(file)) {
    index.replace(at, file.size(), "FILE");
  }
  EXPECT_EQ(index, R"({
  "layer.weight": {
    "safetensors_file": ")" +
                       fs::canonical(made).string() + R"(/FILE",
    "weight_name": "layer.weight",
    "dtype": "bfloat16",
    "shape": [30,40]
  },
  "scale": {
    "safetensors_file": ")" +
                       fs::canonical(made).string() + R"(/FILE",
    "weight_name": "scale",
    "dtype": "float32",
    "shape": []
  },
  "kept": {
    "safetensors_file": "model-0.safetensors",
    "weight_name": "kept",
    "dtype": "bfloat16"
  }
}
)");
  EXPECT_EQ(report.provenance[0].origin, Origin::checkpoint);
  EXPECT_EQ(report.provenance[0].reason, "offloaded");
  EXPECT_EQ(report.provenance[0].bytes_written, 2400u);
  EXPECT_EQ(report.provenance[0].sources.size(), 1u);
  EXPECT_EQ(report.provenance[2].reason, "offloaded");
  EXPECT_EQ(report.provenance[2].bytes_written, 0u);
  EXPECT_EQ(report.bytes_written, 2400u + 4 + 5);
}

TEST(OffloadTest, KeepsOtherNamesOfAnIndexAndReplacesItsOwn) {
  const Folder folder;
  write_text(folder.path() / "index.json",
             R"({"other": {"dtype": "float32", "shape": [2, 3]}, "scale": {"dtype": "int8"}})");
  write_text(folder.path() / "other.dat", "24 bytes of another model");
  write_text(folder.path() / "scale.dat", "old");
  PlanBuilder builder;
  const Plan plan = offload_plan(builder, folder.path());
  load(builder, plan);
  const std::string index = text_of(folder.path() / "index.json");
  EXPECT_THAT(index, HasSubstr(R"("other": {"dtype":"float32","shape":[2,3]})"));
  EXPECT_THAT(index, ::testing::Not(HasSubstr("int8")));
  EXPECT_EQ(text_of(folder.path() / "other.dat"), "24 bytes of another model");
  EXPECT_EQ(offload_values(folder.path()).at("scale"), expected_value(builder, plan.targets[1]));
  EXPECT_THAT(folder.names(),  // the older value of "scale" is gone
              ElementsAre("index.json", data_files(folder.path()).at(0), "other.dat"));
}

TEST(OffloadTest, AFailedLoadLeavesTheFolderAsItWas) {
  const Folder folder;
  write_text(folder.path() / "index.json", R"({"scale": {}})");
  write_text(folder.path() / "scale.dat", "old");
  PlanBuilder builder;
  const Plan plan = offload_plan(builder, folder.path());
  builder.storage.before_read = [](std::size_t, const testing::ReadEvent& event) {
    if (event.offset >= 100) throw Error("io.read", "cannot read", {.path = event.path});
  };
  EXPECT_EQ(load_error(builder, plan).code(), "io.read");
  EXPECT_THAT(folder.names(), ElementsAre("index.json", "scale.dat"));
  EXPECT_EQ(text_of(folder.path() / "scale.dat"), "old");
  EXPECT_EQ(text_of(folder.path() / "index.json"), R"({"scale": {}})");

  PlanBuilder other;
  const Plan elsewhere = offload_plan(other, folder.path() / "new");
  other.storage.before_read = builder.storage.before_read;
  EXPECT_EQ(load_error(other, elsewhere).code(), "io.read");
  EXPECT_FALSE(fs::exists(folder.path() / "new"));
}

TEST(OffloadTest, OlderComponentsGoWithTheValueThatTheyBelongTo) {
  const Folder folder;
  write_text(folder.path() / "index.json",
             R"({"scale.absmax": {"dtype": "float32", "shape": [1]},
                 "scales": {"dtype": "int8", "shape": [1]}})");
  PlanBuilder builder;
  load(builder, offload_plan(builder, folder.path()));
  const std::string index = text_of(folder.path() / "index.json");
  EXPECT_THAT(index, ::testing::Not(HasSubstr("absmax")));
  EXPECT_THAT(index, HasSubstr(R"("scales")"));
}

TEST(OffloadTest, TiedNamesHaveTheSameValue) {
  const Folder folder;
  PlanBuilder builder;
  Plan plan = offload_plan(builder, folder.path());
  PlannedTarget tie = plan.targets[0];
  tie.name = "head.weight";
  tie.delivery = Delivery::none;
  tie.recipe = {.origin = Origin::tie, .tie_of = "layer.weight"};
  plan.targets.push_back(tie);
  load(builder, plan);
  const auto values = offload_values(folder.path());
  EXPECT_EQ(values.at("head.weight"), expected_value(builder, plan.targets[0]));
  EXPECT_EQ(values.size(), 3u);
}

TEST(OffloadTest, WhatNoSafetensorsFileHoldsStandsAlone) {
  const Folder folder;
  PlanBuilder builder;
  builder.add_plain("scales", Dtype::f8_e8m0, Dtype::f8_e8m0, {7}, pattern(7, 1)).delivery =
      Delivery::disk_write;
  Plan plan = builder.build();
  plan.offload_folder = folder.path().string();
  load(builder, plan);
  EXPECT_THAT(folder.names(), ElementsAre("index.json", "scales.dat"));
  EXPECT_EQ(offload_values(folder.path()).at("scales"), expected_value(builder, plan.targets[0]));
  // A load can replace the older data file only together with the index.
  EXPECT_EQ(load_error(builder, plan).code(), "plan.dtype");
  EXPECT_THAT(folder.names(), ElementsAre("index.json", "scales.dat"));
  EXPECT_EQ(offload_values(folder.path()).at("scales"), expected_value(builder, plan.targets[0]));
}

TEST(OffloadTest, TwoRunsInOneFolderKeepOutOfEachOthersWay) {
  const Folder folder;
  PlanBuilder first;
  first.add_plain("a", Dtype::u8, Dtype::u8, {1000}, pattern(1000, 1)).delivery =
      Delivery::disk_write;
  Plan plan = first.build();
  plan.offload_folder = folder.path().string();
  PlanBuilder second;
  second.add_plain("b", Dtype::u8, Dtype::u8, {1000}, pattern(1000, 2)).delivery =
      Delivery::disk_write;
  Plan other = second.build();
  other.offload_folder = folder.path().string();
  // The second load starts and ends while the first load runs. It must not remove the first load's
  // files as leftovers of a killed process, even though both loads share one process.
  bool is_first = true;
  first.storage.before_read = [&](std::size_t, const testing::ReadEvent&) {
    if (std::exchange(is_first, false)) load(second, other);
  };
  const HostMemory memory(plan);
  execute(plan, memory.destinations(), {.threads = 1, .storage = &first.storage});
  const auto values = offload_values(folder.path());
  EXPECT_EQ(values.at("a"), expected_value(first, plan.targets[0]));
  EXPECT_EQ(values.at("b"), expected_value(second, other.targets[0]));
  EXPECT_EQ(data_files(folder.path()).size(), 2u);
}

TEST(OffloadTest, FilesThatAModelStillReadsStay) {
  const Folder folder;
  PlanBuilder builder;
  const Plan plan = offload_plan(builder, folder.path());
  const HostMemory memory(plan);
  const ExecuteOptions options{.storage = &builder.storage, .holds_offload = true};
  const Report first = execute(plan, memory.destinations(), options);
  auto lock = first.offload->lock_values();
  first.offload->commit();
  const auto before = data_files(folder.path());
  ASSERT_EQ(before.size(), 1u);
  PlanBuilder other;
  const Plan same_names = offload_plan(other, folder.path());
  for (int turn = 0; turn < 2; ++turn) {
    load(other, same_names);
    const auto after = data_files(folder.path());
    EXPECT_EQ(after.size(), 2u);
    EXPECT_TRUE(std::ranges::count(after, before.front()) == 1);
  }
  // The model itself may be loaded again.
  const ExecuteOptions again{.storage = &other.storage, .own_offload_file = lock->path()};
  execute(same_names, HostMemory(same_names).destinations(), again);
  EXPECT_EQ(data_files(folder.path()).size(), 1u);
  lock.reset();
  load(other, same_names);
  EXPECT_EQ(data_files(folder.path()).size(), 1u);
}

TEST(OffloadTest, WhatAnEndedRunLeftGoesWithTheNext) {
  const Folder folder;
  const std::string stale = "0123456789abcdef";
  const std::string held = "0123456789abcde0";
  for (const std::string& run : {stale, held}) {
    write_text(folder.path() / offload_lock_name(run), "");
    write_text(folder.path() / offload_index_name(run), "{");
    write_text(folder.path() / offload_data_name(run, 1, false), "values");
  }
  write_text(folder.path() / "loadstone-mine-00001.safetensors", "somebody's");
  const auto lock = local_storage().writable().open_lock(folder.path() / offload_lock_name(held));
  ASSERT_EQ(lock->take(LockMode::exclusive, false), LockResult::taken);
  PlanBuilder builder;
  load(builder, offload_plan(builder, folder.path()));
  for (const bool is_data : {false, true}) {
    const auto name = [&](const std::string& run) {
      return is_data ? offload_data_name(run, 1, false) : offload_lock_name(run);
    };
    EXPECT_FALSE(fs::exists(folder.path() / name(stale)));
    EXPECT_TRUE(fs::exists(folder.path() / name(held)));
  }
  EXPECT_TRUE(fs::exists(folder.path() / "loadstone-mine-00001.safetensors"));
}

TEST(OffloadTest, NamesThatCouldLeaveTheFolderAreRefused) {
  for (const std::string& name : {std::string("../up"), std::string("a/b"), std::string(".."),
                                  std::string(), std::string("nul\0here", 8)}) {
    const Folder folder;
    PlanBuilder builder;
    builder.add_plain(name, Dtype::u8, Dtype::u8, {3}, pattern(3, 1)).delivery =
        Delivery::disk_write;
    Plan plan = builder.build();
    plan.offload_folder = folder.path().string();
    EXPECT_EQ(load_error(builder, plan).code(), "offload.name") << name;
    EXPECT_THAT(folder.names(), IsEmpty());
  }
}

TEST(OffloadTest, AnIndexThatIsNoneIsKept) {
  for (const char* const text : {"[1, 2]", "{\"a\": ", ""}) {
    const Folder folder;
    write_text(folder.path() / "index.json", text);
    PlanBuilder builder;
    const Plan plan = offload_plan(builder, folder.path());
    EXPECT_EQ(load_error(builder, plan).code(), "offload.index") << text;
    EXPECT_EQ(text_of(folder.path() / "index.json"), text);
    EXPECT_THAT(folder.names(), ElementsAre("index.json"));
  }
}

TEST(OffloadTest, WhatIsOnlyKeptNeedsNoFolder) {
  PlanBuilder builder;
  builder.add_plain("same", Dtype::bf16, Dtype::bf16, {5}, pattern(10, 3)).delivery =
      Delivery::disk_keep;
  builder.add_plain("../cast", Dtype::f32, Dtype::bf16, {2, 3}, pattern(24, 4)).delivery =
      Delivery::disk_keep;
  const Plan plan = builder.build();
  const Report report = load(builder, plan);
  EXPECT_EQ(report.bytes_written, 0u);
  EXPECT_EQ(report.bytes_read, 0u);
  EXPECT_EQ(report.provenance[1].reason, "offloaded");
  EXPECT_EQ(report.provenance[1].sources.size(), 1u);
  const auto entries = offload_entries(plan, builder.storage);
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_EQ(entries[1].target, "../cast");
  EXPECT_EQ(entries[1].weight_name, "../cast");
  EXPECT_EQ(entries[1].dtype, "bfloat16");  // the target's dtype, not the file's
  EXPECT_FALSE(entries[1].safetensors_file.empty());
}

TEST(OffloadTest, AFolderMustBeNamed) {
  PlanBuilder builder;
  Plan plan = offload_plan(builder, "");
  EXPECT_EQ(load_error(builder, plan).code(), "plan.options");
}

TEST(OffloadTest, AFullDiskIsFoundBeforeAnythingIsWritten) {
  const Folder folder;
  if (::mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=1m") != 0) {
    GTEST_SKIP() << "no permission to mount a small disk";
  }
  PlanBuilder builder;
  builder.add_plain("fits", Dtype::u8, Dtype::u8, {600000}, pattern(600000, 1)).delivery =
      Delivery::disk_write;
  builder.add_plain("does_not", Dtype::u8, Dtype::u8, {600000}, pattern(600000, 2)).delivery =
      Delivery::disk_write;
  Plan plan = builder.build();
  plan.offload_folder = folder.path().string();
  const Error error = load_error(builder, plan);
  EXPECT_EQ(error.code(), "io.no_space");
  EXPECT_THAT(folder.names(), IsEmpty());
  // Control: without the second target it fits.
  plan.targets.pop_back();
  load(builder, plan);
  EXPECT_THAT(folder.names(), ElementsAre("index.json", data_files(folder.path()).at(0)));
  EXPECT_EQ(::umount(folder.path().c_str()), 0);
}

TEST(OffloadTest, ALimitOnFileSizesIsAnErrorAndNoSignal) {
  const Folder folder;
  PlanBuilder builder;
  const Plan plan = offload_plan(builder, folder.path());
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 1000;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const Error error = load_error(builder, plan);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(error.code(), "io.no_space");
  EXPECT_THAT(folder.names(), IsEmpty());
}

TEST(OffloadTest, AFolderThatMayNotBeWrittenTo) {
  const Folder folder;
  fs::permissions(folder.path(), fs::perms::owner_read | fs::perms::owner_exec |
                                     fs::perms::others_read | fs::perms::others_exec);
  PlanBuilder builder;
  const Plan plan = offload_plan(builder, folder.path());
  const bool root = ::geteuid() == 0;  // permissions do not restrict root
  if (root && ::seteuid(65534) != 0) GTEST_SKIP() << "cannot become an ordinary user";
  const Error error = load_error(builder, plan);
  if (root) {
    ASSERT_EQ(::seteuid(0), 0);
  }
  EXPECT_EQ(error.code(), "io.denied");
  EXPECT_THAT(error.what(), HasSubstr(folder.path().string()));
  fs::permissions(folder.path(), fs::perms::owner_all);
  EXPECT_THAT(folder.names(), IsEmpty());
}

TEST(OffloadTest, ManyFilesAtOnce) {
  const Folder folder;
  PlanBuilder builder;
  for (int i = 0; i < 2000; ++i) {
    builder
        .add_plain("w" + std::to_string(i), Dtype::u8, Dtype::u8, {10},
                   pattern(10, static_cast<std::uint64_t>(i)))
        .delivery = Delivery::disk_write;
  }
  Plan plan = builder.build();
  plan.offload_folder = folder.path().string();
  load(builder, plan);
  EXPECT_EQ(data_files(folder.path()).size(), 32u);  // 64 values in each
  const auto values = offload_values(folder.path());
  EXPECT_EQ(values.size(), 2000u);
  EXPECT_EQ(values.at("w1999"), expected_value(builder, plan.targets[1999]));
}

}  // namespace
}  // namespace loadstone::testing
