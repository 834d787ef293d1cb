// Tests offloads in which each system call in turn fails or is the last call of the process. The
// folder must contain the old or the new values, nothing may stay open or be left behind, and the
// next attempt must succeed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <optional>
#include <random>
#include <set>

#include "faults/failed.h"
#include "loadstone/execute.h"
#include "offload/offload_files.h"
#include "support/faulty_files.h"
#include "support/files.h"
#include "support/offload_values.h"
#include "support/plan_builder.h"

namespace loadstone::testing {
namespace {

namespace fs = std::filesystem;
using test::FaultyFiles;
using test::FileCall;
using test::FileFault;

constexpr FileFault error_of_disk = {.problem = EIO};
constexpr FileFault full_disk = {.problem = ENOSPC};
constexpr FileFault interrupted = {.problem = EINTR};
constexpr FileFault short_write = {.is_short = true};
constexpr FileFault no_memory = {.is_memory = true};

using Values = std::map<std::string, Bytes>;

// A model with values from a seed. Its size does not depend on the seed.
class Model {
 public:
  explicit Model(std::uint64_t seed, const fs::path& folder) {
    for (std::uint64_t i = 0; i < 3; ++i) {
      builder_
          .add_plain("w" + std::to_string(i), Dtype::f32, Dtype::f32, {10, 30},
                     pattern(1200, seed + i))
          .delivery = Delivery::disk_write;
    }
    builder_.add_plain("memory", Dtype::u8, Dtype::u8, {50}, pattern(50, seed));
    plan_ = builder_.build();
    plan_->offload_folder = folder.string();
  }

  void load(Storage& storage) const {
    const HostMemory memory(*plan_);
    const Report report =
        execute(*plan_, memory.destinations(), {.threads = 1, .storage = &storage});
    if (testing::value_of(memory.destinations().back()) !=
        expected_value(builder_, plan_->targets.back())) {
      throw std::runtime_error("a load succeeded with wrong bytes");
    }
  }
  void load() {
    FaultyFiles files(test::no_fault, builder_.storage);
    load(files);
  }

  [[nodiscard]] Values values() const {
    Values values;
    for (const PlannedTarget& target : plan_->targets) {
      if (target.delivery != Delivery::disk_write) continue;
      values[target.name] = expected_value(builder_, target);
    }
    return values;
  }
  [[nodiscard]] Storage& storage() noexcept { return builder_.storage; }

 private:
  PlanBuilder builder_;
  std::optional<Plan> plan_;
};

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  if (!fs::exists(folder)) return names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

class OffloadFaults : public ::testing::TestWithParam<bool> {
 protected:
  [[nodiscard]] fs::path path() const { return fs::path(folder_ / "offload"); }

  // Restores the state of the folder before each attempt: the files of an older load, or no folder.
  void reset() {
    fs::remove_all(path());
    if (!GetParam()) return;
    Model older(100, path());
    older.load();
    before_ = older.values();
  }

  void expect_old_or_new(const Model& model, const std::string& what) {
    const Values found = offload_values(path());
    EXPECT_TRUE(found == before_ || found == model.values()) << what;
  }

  // Expects that a second load succeeds and that the folder contains only its values.
  void expect_second_try(Model& model, const std::string& what) {
    model.load();
    EXPECT_EQ(offload_values(path()), model.values()) << what;
    EXPECT_EQ(names_in(path()).size(), 2u) << what;  // index.json and a data file
  }

  // Returns true if the fault occurred.
  bool try_once(Model& model, const FaultyFiles::Choose& choose, bool removals_work,
                const std::string& what) {
    reset();
    const std::set<std::string> names_before = names_in(path());
    const std::size_t descriptors = test::open_descriptors();
    bool has_failed = false;
    std::uint64_t faults = 0;
    {
      FaultyFiles files(
          [&](const FileCall& call) {
            FileFault fault = choose(call);
            if (removals_work && call.name.starts_with("remove")) fault = {};
            if (fault.problem != 0 || fault.is_short || fault.is_memory) ++faults;
            return fault;
          },
          model.storage());
      has_failed = test::failed(what, [&] { model.load(files); });
    }
    EXPECT_EQ(test::open_descriptors(), descriptors) << what;
    expect_old_or_new(model, what);
    if (!has_failed) {
      EXPECT_EQ(offload_values(path()), model.values()) << what;
    } else if (removals_work && offload_values(path()) == before_) {
      EXPECT_EQ(names_in(path()), names_before) << what;
      EXPECT_EQ(fs::exists(path()), GetParam()) << what;
    }
    expect_second_try(model, what);
    return faults > 0;
  }

  test::TemporaryFolder folder_;
  Values before_;
};

TEST_P(OffloadFaults, EveryCallFailsOnceInEveryWay) {
  Model model(200, path());
  std::uint64_t tries = 0;
  for (const FileFault fault : {error_of_disk, full_disk, interrupted, short_write, no_memory}) {
    for (std::uint64_t number = 1;; ++number) {
      const std::string what = "call " + std::to_string(number) + ", error " +
                               std::to_string(fault.problem) + (fault.is_memory ? " memory" : "");
      if (!try_once(model, test::fail_call(number, fault), true, what)) break;
      ++tries;
    }
  }
  EXPECT_GT(tries, 5u * 20);  // control: faults occurred
}

TEST_P(OffloadFaults, InterruptedCallsAndShortWritesAreNoErrors) {
  Model model(200, path());
  for (const FileFault fault : {interrupted, short_write}) {
    reset();
    // Only every second call fails, so repeating a call succeeds.
    FaultyFiles files(
        [&](const FileCall& call) { return call.number % 2 == 1 ? fault : FileFault(); },
        model.storage());
    model.load(files);
    EXPECT_EQ(offload_values(path()), model.values());
  }
}

TEST_P(OffloadFaults, AThousandRandomOnes) {
  Model model(200, path());
  std::minstd_rand random(GetParam() ? 1 : 2);
  for (int i = 0; i < 500; ++i) {
    const auto one_in = 2 + random() % 60;
    const auto choose = [&](const FileCall&) -> FileFault {
      if (random() % one_in != 0) return {};
      const FileFault faults[] = {error_of_disk, full_disk, interrupted, short_write, no_memory};
      return faults[random() % 5];
    };
    try_once(model, choose, false, "try " + std::to_string(i));
    if (HasFailure()) return;
  }
}

TEST_P(OffloadFaults, AKillAtEveryCall) {
  Model model(200, path());
  std::uint64_t number = 1;
  for (;; ++number) {
    reset();
    const bool killed = test::killed_at(
        number, [&](Storage& files) { model.load(files); }, model.storage());
    const std::string what = "killed at call " + std::to_string(number);
    expect_old_or_new(model, what);
    expect_second_try(model, what);
    if (!killed) break;
  }
  EXPECT_GT(number, 20u);
}

std::string name_of(const ::testing::TestParamInfo<bool>& folder) {
  return folder.param ? "Replaced" : "New";
}

INSTANTIATE_TEST_SUITE_P(Folders, OffloadFaults, ::testing::Bool(), name_of);

// Each read of a load into memory fails once.
TEST(LoadFaults, EveryReadFailsOnce) {
  PlanBuilder builder;
  testing::add_all_movements(builder);
  const Plan plan = builder.build();
  std::uint64_t tries = 0;
  for (const FileFault fault : {error_of_disk, no_memory}) {
    bool failed = true;
    for (std::uint64_t number = 1; failed; ++number) {
      const std::size_t descriptors = test::open_descriptors();
      const HostMemory memory(plan);
      failed = false;
      try {
        FaultyFiles files(test::fail_call(number, fault), builder.storage);
        execute(plan, memory.destinations(), {.threads = 1, .storage = &files});
      } catch (const Error& error) {
        failed = true;
        EXPECT_TRUE(error.code().starts_with("io.") || error.code() == "memory.host")
            << error.what();
      } catch (const std::bad_alloc&) {
        failed = true;
      }
      EXPECT_EQ(test::open_descriptors(), descriptors);
      testing::load_and_compare(builder, plan);
      tries += failed ? 1 : 0;
    }
  }
  EXPECT_GT(tries, 10u);
}

}  // namespace
}  // namespace loadstone::testing
