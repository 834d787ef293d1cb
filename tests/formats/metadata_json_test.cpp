#include <fmt/format.h>
#include <gmock/gmock.h>

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/error.h"
#include "support/errors.h"

namespace loadstone::test {

namespace {

using namespace ::testing;

std::string metadata_json(const std::string& entries) {
  return R"({"format": "loadstone-gguf-metadata", "version": 1, "entries": [)" + entries + "]}";
}

TEST(MetadataJson, EveryTypeIsRead) {
  const Metadata metadata = metadata_from_json(metadata_json(
      R"({"key": "u8", "type": "u8", "value": 255}, {"key": "i8", "type": "i8", "value": -128},
         {"key": "u64", "type": "u64", "value": 18446744073709551615},
         {"key": "i64", "type": "i64", "value": -9223372036854775808},
         {"key": "f32", "type": "f32", "value": 1e-06}, {"key": "f64", "type": "f64", "value": 1},
         {"key": "inf", "type": "f32", "value": "-inf"},
         {"key": "nan", "type": "f64", "value": "nan"}, {"key": "b", "type": "bool", "value": true},
         {"key": "s", "type": "string", "value": "\u00e9"},
         {"key": "list", "type": "array", "items": "string", "value": ["a", "", "b"]},
         {"key": "numbers", "type": "array", "items": "i16", "value": [-1, 2]},
         {"key": "none", "type": "array", "items": "f32", "value": []})"));
  EXPECT_EQ(std::get<std::uint64_t>(metadata.at("u64").value), UINT64_MAX);
  EXPECT_EQ(std::get<std::int64_t>(metadata.at("i64").value), INT64_MIN);
  EXPECT_EQ(std::get<double>(metadata.at("f32").value), double{1e-6f});
  EXPECT_EQ(std::get<double>(metadata.at("inf").value), -std::numeric_limits<double>::infinity());
  EXPECT_EQ(type_name(metadata.at("f64")), "f64");
  EXPECT_EQ(std::get<std::string>(metadata.at("s").value), "\xc3\xa9");
  const auto& list = std::get<MetadataArray>(metadata.at("list").value);
  EXPECT_EQ(std::get<std::string>(list[2].value), "b");
  const auto& numbers = std::get<MetadataArray>(metadata.at("numbers").value);
  EXPECT_EQ(std::get<std::int64_t>(numbers[0].value), -1);
  EXPECT_EQ(type_name(metadata.at("none")), "array of f32");
}

TEST(MetadataJson, PlainValuesGetTheirTypes) {
  const Metadata metadata = metadata_from_json(
      R"({"general.architecture": "wan", "general.file_type": 7, "wan.rope.freq_base": 10000,
          "wan.attention.head_count_kv": [8, 4], "tokenizer.ggml.scores": [1, 0.5],
          "tokenizer.ggml.token_type": [], "a.b": true, "a.u32": 4294967295, "a.u64": 4294967296,
          "a.i32": -2147483648, "a.i64": -2147483649, "a.f32": 0.5, "a.mixed": [1, -2],
          "a.wide": [-1, 2147483648], "a.texts": ["x"], "a.typed": {"type": "u8", "value": 7},
          "format": "pt"})");
  const std::map<std::string, std::string> expected = {
      {"general.architecture", "string"},
      {"general.file_type", "u32"},
      {"wan.rope.freq_base", "f32"},
      {"wan.attention.head_count_kv", "array of u32"},
      {"tokenizer.ggml.scores", "array of f32"},
      {"tokenizer.ggml.token_type", "array of i32"},
      {"a.b", "bool"},
      {"a.u32", "u32"},
      {"a.u64", "u64"},
      {"a.i32", "i32"},
      {"a.i64", "i64"},
      {"a.f32", "f32"},
      {"a.mixed", "array of i32"},
      {"a.wide", "array of i64"},
      {"a.texts", "array of string"},
      {"a.typed", "u8"},
      {"format", "string"}};
  std::map<std::string, std::string> found;
  for (const auto& [key, value] : metadata) found.emplace(key, type_name(value));
  EXPECT_EQ(found, expected);
  EXPECT_EQ(std::get<double>(metadata.at("wan.rope.freq_base").value), 10000);
}

TEST(MetadataJson, APlainValueWithoutATypeIsRefusedByItsKey) {
  for (const char* value : {"null", "{}", R"({"b": 1})", "[]", "[null]", "[[1]]", R"([1, "a"])",
                            "[1, 0.5]", "[true, 1]", "1e39", "[-1, 18446744073709551615]"}) {
    const std::string text = fmt::format(R"({{"some.key": {}}})", value);
    try {
      (void)metadata_from_json(text);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), "convert.metadata_json") << text;
      EXPECT_THAT(error.where().field, StartsWith("some.key")) << text;
    }
  }
  for (const char* text : {R"({"general.name": 7})", R"({"general.file_type": "7"})",
                           R"({"a.block_count": 1.5})", R"({"a": 1, "a": 1})", R"({"a b": 1})"}) {
    EXPECT_EQ(code_of([&] { (void)metadata_from_json(text); }), "convert.metadata_json") << text;
  }
}

TEST(MetadataJson, WhatIsNoneIsRefused) {
  const std::vector<std::string> wrong = {
      "",
      "[]",
      R"({"format": "other", "version": 1, "entries": []})",
      R"({"format": "loadstone-gguf-metadata", "version": 2, "entries": []})",
      R"({"format": "loadstone-gguf-metadata", "version": 1, "entries": [], "more": 1})",
      metadata_json(R"({"key": "a", "type": "u8", "value": 256})"),
      metadata_json(R"({"key": "a", "type": "u8", "value": -1})"),
      metadata_json(R"({"key": "a", "type": "i8", "value": 128})"),
      metadata_json(R"({"key": "a", "type": "u32", "value": 1.5})"),
      metadata_json(R"({"key": "a", "type": "u32", "value": "1"})"),
      metadata_json(R"({"key": "a", "type": "f32", "value": 1e39})"),
      metadata_json(R"({"key": "a", "type": "f32", "value": "infinity"})"),
      metadata_json(R"({"key": "a", "type": "f64", "value": true})"),
      metadata_json(R"({"key": "a", "type": "bool", "value": 1})"),
      metadata_json(R"({"key": "a", "type": "string", "value": null})"),
      metadata_json(R"({"key": "a", "type": "strings", "value": "x"})"),
      metadata_json(R"({"key": "a", "type": "array", "value": [1]})"),
      metadata_json(R"({"key": "a", "type": "u8", "items": "u8", "value": 1})"),
      metadata_json(R"({"key": "a", "type": "array", "items": "array", "value": [[1]]})"),
      metadata_json(R"({"key": "a", "type": "array", "items": "u8", "value": [1, 256]})"),
      metadata_json(R"({"key": "a", "type": "array", "items": "u8", "value": 1})"),
      metadata_json(R"({"key": "a b", "type": "u8", "value": 1})"),
      metadata_json(R"({"key": "", "type": "u8", "value": 1})"),
      metadata_json(R"({"key": "a", "key": "a", "type": "u8", "value": 1})"),
      metadata_json(
          R"({"key": "a", "type": "u8", "value": 1}, {"key": "a", "type": "u8", "value": 1})"),
      metadata_json(R"({"key": "a", "type": "u8", "value": 1, "more": 2})"),
      metadata_json(R"({"key": "a", "type": "u8"})"),
      metadata_json("1")};
  for (const std::string& text : wrong) {
    EXPECT_EQ(code_of([&] { (void)metadata_from_json(text); }), "convert.metadata_json") << text;
  }
  EXPECT_THAT(metadata_from_json(metadata_json("")), IsEmpty());
}

}  // namespace

}  // namespace loadstone::test
