#include "base/named.h"

#include <gmock/gmock.h>

#include "base/text.h"
#include "loadstone/finding.h"

namespace loadstone {

namespace {

TEST(Named, EnumeratorsAndNamesLeadToEachOther) {
  EXPECT_EQ(from_name<Severity>("info"), Severity::info);
  EXPECT_EQ(from_name<Severity>("error"), Severity::error);
  EXPECT_FALSE(from_name<Severity>("Error"));
  EXPECT_FALSE(from_name<Severity>(""));
}

TEST(Named, MessagesListThem) {
  EXPECT_EQ(either(names_of<Severity>()), "info, warning or error");
  const auto is_loud = [](Severity each) { return each != Severity::info; };
  EXPECT_EQ(either(names_of<Severity>(is_loud)), "warning or error");
  EXPECT_EQ(either({}), "");
}

}  // namespace

}  // namespace loadstone
