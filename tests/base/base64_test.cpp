#include "base/base64.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace loadstone::test {
namespace {

std::vector<std::byte> bytes_of(std::string_view text) {
  std::vector<std::byte> bytes;
  for (const char c : text) bytes.push_back(static_cast<std::byte>(c));
  return bytes;
}

// These are the test vectors of RFC 4648.
TEST(Base64, KnownTexts) {
  for (const auto& [plain, text] : {std::pair{"", ""},
                                    {"f", "Zg=="},
                                    {"fo", "Zm8="},
                                    {"foo", "Zm9v"},
                                    {"foob", "Zm9vYg=="},
                                    {"fooba", "Zm9vYmE="},
                                    {"foobar", "Zm9vYmFy"},
                                    {"\xff\xfe\xfb", "//77"}}) {
    EXPECT_EQ(base64_from(bytes_of(plain)), text);
    EXPECT_EQ(bytes_from_base64(text), bytes_of(plain));
  }
}

TEST(Base64, AllBytesComeBack) {
  std::vector<std::byte> bytes;
  for (int i = 0; i < 1000; ++i) {
    EXPECT_EQ(bytes_from_base64(base64_from(bytes)), bytes);
    bytes.push_back(static_cast<std::byte>(i * 37));
  }
}

TEST(Base64, WhatIsNoneIsRefused) {
  for (const char* text : {"Z", "Zg", "Zg=", "Zg===", "====", "=g==", "Z===", "Zm8=Zg==", "Zm 8",
                           "Zm9-", "Zh==", "Zm9=", "Zm9\n", "Zg=a"}) {
    EXPECT_FALSE(bytes_from_base64(text).has_value()) << text;
  }
  EXPECT_FALSE(bytes_from_base64(std::string_view("Zm9\0", 4)).has_value());
}

}  // namespace
}  // namespace loadstone::test
