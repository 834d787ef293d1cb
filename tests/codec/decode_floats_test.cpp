#include <gmock/gmock.h>

#include <vector>

#include "loadstone/decoding.h"
#include "support/errors.h"
#include "support/files.h"

namespace loadstone::test {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

std::vector<float> floats(Encoding encoding, const std::string& bytes, std::size_t count) {
  std::vector<float> values(count);
  decode(encoding, std::as_bytes(std::span(bytes)), values);
  return values;
}

TEST(DecodeFloats, DtypesAndBlocks) {
  EXPECT_THAT(floats(Dtype::f32, raw(1.5f) + raw(-2.0f), 2), ElementsAre(1.5f, -2.0f));
  EXPECT_THAT(floats(Dtype::bf16, std::string("\x80\x3f\x00\xc0", 4), 2), ElementsAre(1, -2));
  EXPECT_THAT(floats(Dtype::i64, raw(std::int64_t{7}), 1), ElementsAre(7));
  EXPECT_THAT(floats(Dtype::boolean, {}, 0), ElementsAre());
  // The block has a scale of 0.5 and 32 codes of 3.
  const std::string block = std::string("\x00\x38", 2) + std::string(32, '\3');
  EXPECT_THAT(floats(BlockFormat::q8_0, block + block, 64), Each(1.5f));
}

TEST(DecodeFloats, WhatIsRefused) {
  const auto code = [](Encoding encoding, std::size_t bytes, std::size_t count) {
    return code_of([&] { floats(encoding, std::string(bytes, '\0'), count); });
  };
  EXPECT_EQ(code(Dtype::f32, 7, 2), "usage");
  EXPECT_EQ(code(BlockFormat::q8_0, 34, 31), "usage");
  EXPECT_EQ(code(BlockFormat::q8_0, 34, 32), "");
  EXPECT_EQ(code(Dtype::f4, 1, 2), "plan.dtype");
  EXPECT_EQ(code(Dtype::c64, 8, 1), "plan.dtype");
  EXPECT_EQ(code(BlockFormat::q8_1, 36, 32), "gg.no_dequant");
}

}  // namespace
}  // namespace loadstone::test
