#include "base/natural_order.h"

#include <gtest/gtest.h>

namespace loadstone {
namespace {

TEST(NaturalOrder, NumbersByValueTheRestByByte) {
  EXPECT_LT(natural_order("a.9.b", "a.10.b"), 0);
  EXPECT_LT(natural_order("a.9", "b.1"), 0);
  EXPECT_GT(natural_order("99999999999999999999999", "99999999999999999999998"), 0);
  EXPECT_EQ(natural_order("x1y", "x1y"), 0);
  EXPECT_NE(natural_order("x01y", "x1y"), 0);
  EXPECT_LT(natural_order("x1", "x1y"), 0);
  EXPECT_LT(natural_order("", "0"), 0);
}

TEST(NaturalOrder, BytesHaveNoSign) {
  EXPECT_TRUE(natural_less("z", "\xc3\xa9"));
  EXPECT_FALSE(natural_less("\xc3\xa9", "z"));
  EXPECT_FALSE(natural_less("00", "0"));
}

}  // namespace
}  // namespace loadstone
