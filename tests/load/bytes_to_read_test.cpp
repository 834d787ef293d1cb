// Tests that a load reads exactly as many bytes as its plan predicts, even for columns of a matrix.
#include <gtest/gtest.h>

#include "engine/limits.h"
#include "loadstone/execute.h"
#include "plan/values.h"
#include "support/plan_builder.h"

namespace loadstone {
namespace {

using testing::pattern;
using testing::PlanBuilder;

constexpr std::uint64_t kib = 1024;
constexpr std::uint64_t row = 1024 * kib;
constexpr std::uint64_t rows = 3;

class BytesToRead : public ::testing::Test {
 protected:
  void add_columns(std::uint64_t begin, std::uint64_t count, Dtype dtype = Dtype::u8,
                   std::uint64_t width = row) {
    const std::string name = "w" + std::to_string(++targets_);
    builder_.add_target(name, dtype, {rows, count},
                        {{.source = source_,
                          .source_offset = begin,
                          .dims = {{rows, width, count}, {count, 1, 1}}}});
  }

  void expect(std::uint64_t planned, std::uint64_t read) {
    const Plan plan = builder_.build();
    EXPECT_EQ(limits_of(plan, values_of(plan)).bytes_to_read(), planned);
    const HostMemory memory(plan);
    const ExecuteOptions options = {.threads = 1, .storage = &builder_.storage};
    EXPECT_EQ(execute(plan, memory.destinations(), options).bytes_read, read);
  }
  void expect(std::uint64_t bytes) { expect(bytes, bytes); }

 private:
  PlanBuilder builder_;
  std::uint32_t source_ = builder_.add_tensor("w", Dtype::u8, {rows, row}, pattern(rows* row, 1));
  int targets_ = 0;
};

TEST_F(BytesToRead, OfColumnsAreThose) {
  add_columns(300 * kib, 200 * kib);
  expect(rows * 200 * kib);
}

// Each row is shorter than one read, so the gaps between rows are read too.
TEST_F(BytesToRead, AreThoseOfRowsWhereTheHolesAreReadOver) {
  add_columns(100, 12 * kib, Dtype::u8, 16 * kib);
  expect((rows - 1) * 16 * kib + 12 * kib);
}

TEST_F(BytesToRead, OfACastAreWithLargerHoles) {
  add_columns(100, 8 * kib, Dtype::i32, 72 * kib);
  expect((rows - 1) * 72 * kib + 8 * kib);
}

TEST_F(BytesToRead, OfACastAreWithoutHolesThatAreLargerStill) {
  add_columns(100, 8 * kib, Dtype::i32, 72 * kib + 4);
  expect(rows * 8 * kib);
}

TEST_F(BytesToRead, OfColumnsBesideEachOtherAreAllOfThem) {
  add_columns(0, 100 * kib);
  add_columns(700 * kib, 200 * kib);
  expect(rows * 300 * kib);
}

TEST_F(BytesToRead, OfTheSameColumnsAreCountedOnce) {
  add_columns(0, 100 * kib);
  add_columns(0, 100 * kib);
  expect(rows * 100 * kib);
}

TEST_F(BytesToRead, AreNoMoreThanTheTensorHas) {
  add_columns(0, row);
  add_columns(200 * kib, 300 * kib);
  expect(rows * row);
}

TEST_F(BytesToRead, OfColumnsThatOverlapAreNoLessThanARead) {
  add_columns(0, 600 * kib);
  add_columns(400 * kib, 600 * kib);
  const std::uint64_t hull = (rows - 1) * row + 1000 * kib;
  expect(hull, rows * 1000 * kib);
}

}  // namespace
}  // namespace loadstone
