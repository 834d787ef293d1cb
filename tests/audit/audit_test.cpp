#include "loadstone/audit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "loadstone/error.h"

namespace loadstone {
namespace {

using namespace ::testing;

// A plan, and the report of a load that wrote every target of the plan.
struct Load {
  Plan plan;
  Report report;

  // Adds a target with 8 bytes to the plan.
  Provenance& add(const std::string& name, Origin origin, Delivery delivery = Delivery::none) {
    PlannedTarget& target = plan.targets.emplace_back();
    target.name = name;
    target.shape = {2};
    target.device = "cpu";
    target.delivery = delivery;
    target.recipe.origin = origin;
    Provenance& item = report.provenance.emplace_back();
    item.target = name;
    item.origin = origin;
    item.delivery = delivery;
    if (delivery == Delivery::memory || delivery == Delivery::disk_write) item.bytes_written = 8;
    if (origin == Origin::checkpoint) {
      item.sources = {{.tensor = name, .shard = "a", .offset_begin = 0, .offset_end = 8}};
    }
    return item;
  }
};

std::string code_of(const Audit& result) {
  try {
    result.require_real();
  } catch (const Error& error) {
    return error.code();
  }
  return "none";
}

TEST(AuditTest, AWholeLoadIsReal) {
  Load load;
  load.add("weight", Origin::checkpoint, Delivery::memory);
  load.add("view", Origin::checkpoint, Delivery::file_view);
  load.add("zeros", Origin::zeros, Delivery::memory);
  load.add("rope", Origin::constructor);
  load.add("new_head", Origin::initialiser);
  load.add("tied", Origin::tie);
  load.plan.targets.back().recipe.tie_of = "weight";
  const Audit result = audit(load.plan, load.report);
  EXPECT_TRUE(result.ok());
  EXPECT_EQ(code_of(result), "none");
  EXPECT_EQ(result.provenance.size(), 6u);
  EXPECT_THAT(result.text(), StartsWith("All 6 tensors accounted for.\n"));
  EXPECT_THAT(result.text(), HasSubstr("checkpoint   2"));
  EXPECT_THAT(result.text(), HasSubstr("tie          1"));
  EXPECT_THAT(result.text(), Not(HasSubstr("excluded")));
}

TEST(AuditTest, FewerBytesThanTheTargetHasAreUnaccounted) {
  Load load;
  load.add("half", Origin::checkpoint, Delivery::memory).bytes_written = 4;
  load.add("no_zeros", Origin::zeros, Delivery::memory).bytes_written = 0;
  load.add("no_constant", Origin::constant, Delivery::memory).bytes_written = 0;
  load.add("half_a_file", Origin::checkpoint, Delivery::disk_write).bytes_written = 7;
  const Audit result = audit(load.plan, load.report);
  EXPECT_THAT(result.unaccounted, ElementsAre("half", "no_zeros", "no_constant", "half_a_file"));
  EXPECT_EQ(code_of(result), "audit.unaccounted");
  EXPECT_THAT(result.text(), StartsWith("NOT accounted for: 4 of 4 tensors"));
}

TEST(AuditTest, WhatWasNeverDeliveredIsOnMeta) {
  Load load;
  load.add("fine", Origin::checkpoint, Delivery::memory);
  load.add("lost", Origin::checkpoint);
  load.add("nameless", Origin::excluded);
  load.add("meta", Origin::constructor);
  load.plan.targets.back().device = "meta";
  const Audit result = audit(load.plan, load.report);
  EXPECT_THAT(result.on_meta, ElementsAre("lost", "nameless", "meta"));
  EXPECT_THAT(result.unaccounted, IsEmpty());
  EXPECT_EQ(code_of(result), "audit.on_meta");
  try {
    result.require_real();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("3 tensors"));
    EXPECT_THAT(error.what(), HasSubstr("'nameless'"));
  }
}

TEST(AuditTest, WhatIsNotHeldOnPurposeIsNamedAndNoFailure) {
  Load load;
  load.add("left_on_purpose", Origin::excluded).reason = "placed on meta";
  load.add("written", Origin::checkpoint, Delivery::disk_write).reason = "offloaded";
  load.add("kept", Origin::checkpoint, Delivery::disk_keep).reason = "offloaded";
  const Audit result = audit(load.plan, load.report);
  EXPECT_TRUE(result.ok());
  EXPECT_THAT(result.not_held, ElementsAre("left_on_purpose", "written", "kept"));
  EXPECT_THAT(result.text(), HasSubstr("3 of them intentionally without a value in memory"));
}

TEST(AuditTest, ATieIsWhatItsRootIs) {
  Load load;
  load.add("root", Origin::checkpoint, Delivery::memory).bytes_written = 0;
  for (const char* const root : {"root", "nobody", "tied2", "tied0"}) {
    load.add("tied" + std::to_string(load.plan.targets.size() - 1), Origin::tie);
    load.plan.targets.back().recipe.tie_of = root;
  }
  const Audit result = audit(load.plan, load.report);
  EXPECT_THAT(result.unaccounted, ElementsAre("root", "tied0", "tied1", "tied2", "tied3"));
}

TEST(AuditTest, AReportThatLacksATargetDoesNotHideIt) {
  Load load;
  load.add("a", Origin::checkpoint, Delivery::memory);
  load.add("b", Origin::checkpoint, Delivery::memory);
  load.report.provenance.erase(load.report.provenance.begin());
  EXPECT_THAT(audit(load.plan, load.report).unaccounted, ElementsAre("a"));
  load.report.provenance.clear();
  EXPECT_THAT(audit(load.plan, load.report).unaccounted, ElementsAre("a", "b"));
}

TEST(AuditTest, ManyNamesAreCut) {
  Load load;
  for (int i = 0; i < 300; ++i) load.add("t" + std::to_string(i), Origin::checkpoint);
  const Audit result = audit(load.plan, load.report);
  EXPECT_THAT(result.text(), HasSubstr("300 on meta: 't0', 't1', 't2', 't3', 't4' and 295 more"));
}

}  // namespace
}  // namespace loadstone
