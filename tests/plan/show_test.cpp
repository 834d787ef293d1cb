// Plans for people.
#include <gmock/gmock.h>

#include "loadstone/plan.h"
#include "plan/fold.h"
#include "support/plans.h"

namespace loadstone::test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

Plan layered() { return plan_of_layers("<script>alert('&')</script>\x1b[31m"); }

TEST(Table, FoldsRepeatedLayers) {
  const auto rows = fold_targets(layered());
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0].name, "layer.{0-11}.q.weight");
  EXPECT_EQ(rows[0].count, 12u);
  EXPECT_EQ(rows[0].dtype, "BF16 -> F32");
  EXPECT_EQ(rows[0].bytes, 12u * 64 * 4);
}

TEST(Table, SaysAllThatMatters) {
  const std::string text = to_table(layered());
  EXPECT_THAT(text, HasSubstr("layer.{0-11}.k.weight  x12"));
  EXPECT_THAT(text, HasSubstr("[8, 8]"));
  EXPECT_THAT(text, HasSubstr("25 targets: 24 checkpoint, 1 zeros"));
  EXPECT_THAT(text, HasSubstr("warning  plan.missing"));
  EXPECT_THAT(text, HasSubstr("plan.unexpected"));
  EXPECT_THAT(text, HasSubstr("info     plan.cast"));
  EXPECT_THAT(text, HasSubstr("3.1 kB to read"));
  EXPECT_THAT(text, HasSubstr("on cpu"));
  EXPECT_THAT(text, HasSubstr("0 errors, 2 warnings"));
  EXPECT_THAT(text, Not(HasSubstr("\x1b")));  // names cannot steer a terminal
}

TEST(Table, NumbersThatDoNotCountStay) {
  const Plan plan =
      make_plan(fake_catalog({{"block2.0.w", {1}}, {"block2.7.w", {1}}, {"block2.9.w", {1}}}),
                skeleton_of({target_of("block2.0.w", {1}), target_of("block2.7.w", {1}),
                             target_of("block2.9.w", {1})}));
  EXPECT_EQ(fold_targets(plan)[0].name, "block2.{0,7,9}.w");
}

}  // namespace
}  // namespace loadstone::test
