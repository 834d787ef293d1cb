// Tests that loadstone copies files from network file systems even if the caller requests views.
#include <gmock/gmock.h>

#include "loadstone/plan.h"
#include "plan/plan_json.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/memory_storage.h"
#include "support/plans.h"

namespace loadstone::test {
namespace {

using ::testing::HasSubstr;

TEST(NetworkFiles, AreNeverMapped) {
  MemoryStorage storage;
  storage.add_file("/m.safetensors", safetensors_bytes({{"kept", "F32", {5}, some_bytes(20)}}));
  OpenOptions open;
  open.storage = &storage;
  PlanOptions options;
  options.mmap = true;
  const auto plan = [&] {
    return make_plan(open_checkpoint("/m.safetensors", open), skeleton_of({target_of("kept", {5})}),
                     options);
  };
  const Plan here = plan();
  ASSERT_EQ(here.targets[0].delivery, Delivery::file_view);
  EXPECT_TRUE(found(here, "plan.mmap").empty());
  const std::string text = to_json(here);
  EXPECT_EQ(plan_from_json(text, open).targets[0].delivery, Delivery::file_view);

  storage.move_to_network();
  const Plan there = plan();
  EXPECT_EQ(there.targets[0].delivery, Delivery::memory);
  ASSERT_EQ(found(there, "plan.mmap").size(), 1u);
  EXPECT_THAT(found(there, "plan.mmap")[0].message, HasSubstr("another machine"));
  const auto error = error_of([&] { (void)plan_from_json(text, open); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), "plan.json");
  EXPECT_THAT(error->message(), HasSubstr("another machine"));
}

}  // namespace
}  // namespace loadstone::test
