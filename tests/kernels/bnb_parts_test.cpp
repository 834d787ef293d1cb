#include "kernels/bnb_parts.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "loadstone/error.h"

namespace loadstone {
namespace {

using Parts = std::vector<BnbPart>;

// The weight has 5 x 7 = 35 values in blocks of 32, which gives 18 bytes of codes and 2 scales.
const Shape shape = {5, 7};

Parts plain() { return {{"data", Dtype::u8, {18, 1}}, {"absmax", Dtype::f32, {2}}}; }

Parts nested() {
  return {{"data", Dtype::u8, {18, 1}},       {"absmax", Dtype::u8, {2}},
          {"code", Dtype::f32, {16}},         {"nested_absmax", Dtype::f32, {1}},
          {"nested_code", Dtype::f32, {256}}, {"nested_offset", Dtype::f32, {}}};
}

Parts rows() { return {{"data", Dtype::i8, {5, 7}}, {"absmax", Dtype::f32, {5}}}; }

// Returns the code and the component of the first broken rule, or "".
std::string broken(BnbEncoding encoding, const Parts& parts, const Shape& of = shape,
                   std::uint64_t block_size = 32) {
  const auto problem = check_bnb_parts(encoding, of, block_size, parts);
  if (!problem) return "";
  EXPECT_NE(find_code(problem->code), nullptr) << problem->code;
  EXPECT_FALSE(problem->message.empty());
  return problem->code + " " + problem->part;
}

Parts without(Parts parts, std::string_view name) {
  std::erase_if(parts, [&](const BnbPart& part) { return part.name == name; });
  return parts;
}

Parts with(Parts parts, const BnbPart& other) {
  for (BnbPart& part : parts) {
    if (part.name == other.name) part = other;
  }
  return parts;
}

TEST(BnbPartsTest, WhatFitsIsAccepted) {
  EXPECT_EQ(broken(BnbEncoding::nf4, plain()), "");
  EXPECT_EQ(broken(BnbEncoding::fp4, nested()), "");
  EXPECT_EQ(broken(BnbEncoding::fp4, without(without(nested(), "code"), "nested_code")), "");
  EXPECT_EQ(broken(BnbEncoding::int8, rows()), "");
  EXPECT_EQ(broken(BnbEncoding::nf4, with(plain(), {"data", Dtype::bf16, {9, 1}})), "");
  EXPECT_EQ(
      broken(BnbEncoding::nf4, {{"data", Dtype::u8, {0}}, {"absmax", Dtype::f32, {0}}}, {0, 4}),
      "");
}

TEST(BnbPartsTest, EachBrokenRuleIsNamed) {
  const auto nf4 = [](const Parts& parts) { return broken(BnbEncoding::nf4, parts); };
  const auto int8 = [](const Parts& parts) { return broken(BnbEncoding::int8, parts); };
  EXPECT_EQ(nf4(without(plain(), "absmax")), "q.scale_missing absmax");
  EXPECT_EQ(nf4(without(plain(), "data")), "q.scale_missing data");
  EXPECT_EQ(nf4(without(nested(), "nested_absmax")), "q.scale_missing nested_absmax");
  EXPECT_EQ(nf4(without(nested(), "nested_offset")), "q.scale_missing nested_offset");
  EXPECT_EQ(nf4(with(plain(), {"absmax", Dtype::f32, {1}})), "q.scale_shape absmax");
  EXPECT_EQ(nf4(with(plain(), {"absmax", Dtype::f32, {3}})), "q.scale_shape absmax");
  EXPECT_EQ(nf4(with(plain(), {"absmax", Dtype::u8, {2}})), "q.dtype absmax");
  EXPECT_EQ(nf4(with(nested(), {"absmax", Dtype::f32, {2}})), "q.dtype absmax");
  EXPECT_EQ(nf4(with(nested(), {"code", Dtype::f32, {15}})), "q.scale_shape code");
  EXPECT_EQ(nf4(with(nested(), {"nested_absmax", Dtype::f32, {2}})), "q.scale_shape nested_absmax");
  EXPECT_EQ(nf4(with(nested(), {"nested_code", Dtype::f32, {255}})), "q.scale_shape nested_code");
  EXPECT_EQ(nf4(with(nested(), {"nested_offset", Dtype::f32, {2}})), "q.scale_shape nested_offset");
  EXPECT_EQ(nf4(with(plain(), {"data", Dtype::u8, {17, 1}})), "q.shape data");
  EXPECT_EQ(nf4(with(plain(), {"data", Dtype::u8, {UINT64_MAX, 2}})), "q.shape data");
  Parts more = plain();
  more.push_back({"zeros", Dtype::f32, {2}});
  EXPECT_EQ(nf4(more), "q.scale_unused zeros");
  EXPECT_EQ(int8(with(rows(), {"absmax", Dtype::f32, {4}})), "q.scale_shape absmax");
  EXPECT_EQ(int8(with(rows(), {"data", Dtype::i8, {5, 6}})), "q.shape data");
  EXPECT_EQ(int8(with(rows(), {"data", Dtype::u8, {5, 7}})), "q.dtype data");
  EXPECT_EQ(int8(nested()), "q.scale_unused code");
}

TEST(BnbPartsTest, SizesThatLieAreRefused) {
  EXPECT_EQ(broken(BnbEncoding::nf4, plain(), {UINT64_MAX, 2}), "q.shape data");
  EXPECT_EQ(broken(BnbEncoding::nf4, plain(), {UINT64_MAX / 4}), "q.shape data");
  EXPECT_EQ(broken(BnbEncoding::int8, rows(), {35}), "q.shape data");
  EXPECT_EQ(broken(BnbEncoding::int8, rows(), {UINT64_MAX, 2, 0}), "q.shape data");
  for (const std::uint64_t size : std::vector<std::uint64_t>{0, 1, 31, 48, 8192}) {
    EXPECT_EQ(broken(BnbEncoding::nf4, plain(), shape, size), "q.group_size data");
  }
}

TEST(BnbPartsTest, ScalesMustBeFinite) {
  std::vector<float> scales = {1.0f, 0.0f, -2.0f};
  const auto check = [&] {
    return check_bnb_scales("absmax", reinterpret_cast<const std::byte*>(scales.data()),
                            scales.size());
  };
  EXPECT_FALSE(check().has_value());
  scales[2] = INFINITY;
  EXPECT_EQ(check()->found, "an infinity at 2");
  scales[1] = NAN;
  EXPECT_EQ(check()->found, "NaN at 1");
  EXPECT_EQ(check()->code, "q.nan");
}

TEST(BnbPartsTest, TheTableOfCodesMustBeTheFormats) {
  for (const Bnb4Code code : {Bnb4Code::nf4, Bnb4Code::fp4}) {
    std::vector<float> values(bnb4_values(code).begin(), bnb4_values(code).end());
    const auto check = [&] {
      return check_bnb_code(code, reinterpret_cast<const std::byte*>(values.data()));
    };
    EXPECT_FALSE(check().has_value());
    if (code == Bnb4Code::fp4) values[8] = -0.0f;  // older versions of bitsandbytes store -0
    EXPECT_FALSE(check().has_value());
    values[5] = std::nextafter(values[5], 2.0f);
    EXPECT_EQ(check()->code, "q.code");
  }
}

}  // namespace
}  // namespace loadstone
