// Tests the rules for an index and its shards, and for the parts of a split GGUF file.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <map>

#include "loadstone/catalog.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/memory_storage.h"

namespace loadstone::test {

namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr const char* shard_1 = "model-00001-of-00002.safetensors";
constexpr const char* shard_2 = "model-00002-of-00002.safetensors";

std::string one(const std::string& name) { return safetensors_bytes({{name, "U8", {2}, "ab"}}); }

class Sharded : public ::testing::Test {
 protected:
  Sharded() {
    add(shard_1, one("a"));
    add(shard_2, one("b"));
  }
  void add(const std::string& name, const std::string& bytes) {
    storage.add_file("/m/" + name, bytes);
  }
  void index(const std::string& text, const std::string& name = "model.safetensors.index.json") {
    add(name, text);
  }
  std::shared_ptr<const Catalog> open(const std::string& path = "/m") {
    return open_checkpoint(path, {.storage = &storage});
  }
  std::optional<Error> error() {
    return error_of([&] { (void)open(); });
  }
  std::vector<std::string> codes() {
    std::vector<std::string> all;
    const auto catalog = open();
    for (const Finding& finding : catalog->findings()) all.push_back(finding.code);
    return all;
  }

  MemoryStorage storage;
};

TEST_F(Sharded, OpensByFolderAndByIndex) {
  index(index_json({{"a", shard_1}, {"b", shard_2}}, 4));
  EXPECT_THAT(codes(), IsEmpty());
  EXPECT_EQ(open()->tensors().size(), 2u);
  EXPECT_EQ(open("/m/model.safetensors.index.json")->shards()[1].relative_path, shard_2);
}

TEST_F(Sharded, MetadataThatDifferAreNamed) {
  using Texts = std::map<std::string, std::string>;
  const auto codes_with = [&](const Texts& first, const Texts& second) {
    add(shard_1, safetensors_bytes({{"a", "U8", {2}, "ab"}}, first));
    add(shard_2, safetensors_bytes({{"b", "U8", {2}, "ab"}}, second));
    return codes();
  };
  EXPECT_THAT(codes_with({{"k", "1"}}, {{"k", "2"}}), ElementsAre("ix.metadata"));
  EXPECT_THAT(open()->findings().front().message, HasSubstr(std::string(shard_2)));
  EXPECT_THAT(codes_with({{"k", "1"}}, {{"k", "1"}, {"other", "2"}}), IsEmpty());
  EXPECT_THAT(codes_with({{"DCP_SHARDING_INFO", "{}"}}, {{"DCP_SHARDING_INFO", "[]"}}), IsEmpty());
  // loadstone reports one finding for all files that differ.
  const auto part = [](int i) { return fmt::format("model-0000{}-of-00003.safetensors", i); };
  for (int i = 1; i <= 3; ++i) {
    storage.add_file("/n/" + part(i),
                     safetensors_bytes({{part(i), "U8", {2}, "ab"}}, {{"k", std::to_string(i)}}));
  }
  const auto found = open("/n")->findings();
  ASSERT_EQ(found.size(), 1u);
  EXPECT_THAT(found.front().message, HasSubstr(fmt::format("'{}', '{}'", part(2), part(3))));
}

TEST_F(Sharded, DiffusersNamesAndFoldersBelow) {
  add("unet/part.safetensors", one("c"));
  index(index_json({{"c", "unet//./part.safetensors"}}),
        "diffusion_pytorch_model.safetensors.index.json");
  EXPECT_EQ(open()->shards()[0].relative_path, "unet/part.safetensors");
}

TEST_F(Sharded, TwoIndexesAreAmbiguousUnlessOneIsUsual) {
  index(index_json({{"a", shard_1}}), "x.safetensors.index.json");
  index(index_json({{"b", shard_2}}), "model.safetensors.index.fp16.json");
  EXPECT_EQ(error()->code(), "format.no_checkpoint");
  index(index_json({{"a", shard_1}, {"b", shard_2}}));
  EXPECT_EQ(open()->tensors().size(), 2u);
}

struct BadIndex {
  std::string text;
  std::string code;
  std::string culprit;
  std::string field;
};

class RefusedIndex : public Sharded, public ::testing::WithParamInterface<BadIndex> {};

TEST_P(RefusedIndex, WithItsCodeAndTheCulprit) {
  const BadIndex& test = GetParam();
  index(test.text);
  const auto problem = error();
  ASSERT_TRUE(problem) << "accepted: " << test.text;
  EXPECT_EQ(problem->code(), test.code) << problem->what();
  EXPECT_THAT(problem->what(), HasSubstr(test.culprit));
  EXPECT_THAT(problem->what(), HasSubstr(test.field));
  EXPECT_THAT(problem->what(), HasSubstr("/m/"));
}

std::vector<BadIndex> bad_indexes() {
  std::vector<BadIndex> all;
  for (const char* name :
       {"../x.safetensors", "a/../../x.safetensors", "sub/../model.safetensors", "..", "/x",
        "/m/model-00001-of-00002.safetensors", "..\\x", "a\\b.safetensors", "\\\\host\\x", "C:/x",
        "c:x.safetensors", "//x", "./../x"}) {
    all.push_back({index_json({{"a", shard_1}, {"b", name}}), "ix.path_escape",
                   std::string(name).substr(0, 2), "weight_map"});
  }
  for (const std::string& name : {std::string(), std::string("."), std::string("x\0.y", 4),
                                  std::string("x\ny"), std::string("\x7f"), std::string("./")}) {
    all.push_back({index_json({{"a", shard_1}, {"b", name}}), "ix.path", "b", "weight_map"});
  }
  for (const char* value : {"1", "null", "true", "[]", "{}", R"(["x"])", "1.5"}) {
    all.push_back({fmt::format(R"({{"weight_map":{{"a":"{}","b":{}}}}})", shard_1, value),
                   "ix.weight_map", "b", "weight_map"});
    if (*value != '{') {
      all.push_back({fmt::format(R"({{"weight_map":{}}})", value), "ix.weight_map", "weight_map",
                     "weight_map"});
    }
  }
  all.push_back({R"({"weight_map":{}})", "ix.weight_map", "weight_map", "weight_map"});
  all.push_back({"{}", "ix.weight_map", "weight_map", "weight_map"});
  all.push_back({R"({"Weight_map":{"a":"x"}})", "ix.weight_map", "weight_map", "weight_map"});
  for (const char* text :
       {"", "[]", "7", "{", R"({"weight_map":)", R"({"weight_map":{"a":"x"})",
        R"({"weight_map":{"a":"x"}}})", R"({"weight_map":{"a":"x",}})",
        R"({"weight_map":{"a":NaN}})", R"({"weight_map":{"a":"\ud800"}})",
        "{\"weight_map\":{\"a\":\"\xff\"}}", R"({"metadata":{"x":[1,]},"weight_map":{"a":"x"}})",
        "{'weight_map':{}}", "\xef\xbb\xbf{}"}) {
    all.push_back({text, "ix.json", "index.json", "index"});
  }
  all.push_back(
      {R"({"metadata":)" + std::string(100000, '[') + "}", "ix.json", "index.json", "index"});
  all.push_back({fmt::format(R"({{"weight_map":{{"a":"{0}","b":"{0}","a":"{0}"}}}})", shard_1),
                 "ix.duplicate", "a", "weight_map"});
  all.push_back(
      {fmt::format(R"({{"weight_map":{{"a":"{0}"}},"weight_map":{{"a":"{0}"}}}})", shard_1),
       "ix.duplicate", "weight_map", "weight_map"});
  all.push_back({index_json({{"a", shard_1}, {"b", "model-00003-of-00003.safetensors"}}),
                 "ix.missing_shard", "model-00003-of-00003.safetensors", "weight_map"});
  all.push_back({index_json({{"a", shard_1}, {"ghost.w", shard_2}}), "ix.tensor_missing", "ghost.w",
                 "weight_map"});
  all.push_back(
      {index_json({{"a", shard_2}, {"b", shard_2}}), "ix.tensor_missing", "'a'", "weight_map"});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Rules, RefusedIndex, ::testing::ValuesIn(bad_indexes()));

TEST_F(Sharded, OfATensorInTwoShardsTheIndexTakesOne) {
  add(shard_1, safetensors_bytes({{"a", "U8", {2}, "ab"}, {"c", "U8", {2}, "ab"}}));
  add(shard_2, safetensors_bytes({{"b", "U8", {2}, "ab"}, {"a", "U8", {1}, "x"}}));
  for (const bool is_second : {false, true}) {
    index(index_json({{"a", is_second ? shard_2 : shard_1}, {"b", shard_2}, {"c", shard_1}},
                     is_second ? 5 : 6));
    EXPECT_THAT(codes(), ElementsAre("ix.replaced"));
    const auto catalog = open();
    ASSERT_EQ(catalog->tensors().size(), 3);
    const TensorInfo& taken = catalog->tensors()[catalog->find("a").value()];
    EXPECT_EQ(catalog->shards()[taken.shard].relative_path, is_second ? shard_2 : shard_1);
    EXPECT_EQ(taken.byte_count(), is_second ? 1 : 2);
    const Finding& finding = catalog->findings()[0];
    EXPECT_THAT(finding.sources, ElementsAre("a"));
    EXPECT_THAT(finding.message,
                HasSubstr(fmt::format("'a' of '{}', not of '{}'", is_second ? shard_2 : shard_1,
                                      is_second ? shard_1 : shard_2)));
  }
}

TEST_F(Sharded, ATensorInTwoShardsIsRefusedIfTheIndexDoesNotListIt) {
  add(shard_1, safetensors_bytes({{"c", "U8", {2}, "ab"}, {"a", "U8", {2}, "ab"}}));
  add(shard_2, safetensors_bytes({{"b", "U8", {2}, "ab"}, {"a", "U8", {1}, "x"}}));
  index(index_json({{"c", shard_1}, {"b", shard_2}}));
  const auto problem = error();
  ASSERT_TRUE(problem);
  EXPECT_EQ(problem->code(), "ix.duplicate");
  EXPECT_EQ(problem->where().tensor, "a");
  EXPECT_THAT(problem->what(), HasSubstr(shard_1));
  EXPECT_THAT(problem->what(), HasSubstr(shard_2));
}

TEST_F(Sharded, ShardsThatAreNoFilesAreRefused) {
  index(index_json({{"a", shard_1}, {"b", "pipe.safetensors"}}));
  storage.add_pipe("/m/pipe.safetensors");
  EXPECT_EQ(error()->code(), "ix.not_regular");
  index(index_json({{"a", shard_1}, {"b", "sub"}}));
  storage.add_folder("/m/sub");
  EXPECT_EQ(error()->code(), "ix.not_regular");
  index(index_json({{"a", shard_1}, {"b", "link.safetensors"}}));
  storage.add_file("/outside.safetensors", one("b"));
  storage.add_link("/m/link.safetensors", "../outside.safetensors");
  EXPECT_EQ(error()->code(), "ix.path_escape");
  EXPECT_THAT(error()->what(), HasSubstr("weight_map"));
  // A link to a folder outside the checkpoint is rejected too.
  index(index_json({{"a", shard_1}, {"b", "away/x.safetensors"}}));
  storage.add_file("/elsewhere/x.safetensors", one("b"));
  storage.add_link("/m/away", "/elsewhere");
  EXPECT_EQ(error()->code(), "ix.path_escape");
}

TEST_F(Sharded, ABrokenShardIsNamed) {
  index(index_json({{"a", shard_1}, {"b", shard_2}}));
  const std::string good = one("b");
  add(shard_2, good.substr(0, good.size() - 1));
  const auto problem = error();
  ASSERT_TRUE(problem);
  EXPECT_EQ(problem->code(), "st.truncated");
  EXPECT_EQ(problem->where().path, std::string("/m/") + shard_2);
  EXPECT_EQ(problem->where().tensor, "b");
}

TEST_F(Sharded, WhatDoesNotAddUpIsTold) {
  index(index_json({{"a", shard_1}, {"b", shard_2}}, 5));
  EXPECT_THAT(codes(), ElementsAre("ix.total_size"));
  index(fmt::format(R"({{"metadata":{{"total_size":4.0}},"weight_map":{{"a":"{}","b":"{}"}}}})",
                    shard_1, shard_2));
  EXPECT_THAT(codes(), IsEmpty());
  for (const char* size : {"\"4\"", "-4", "4e9", "null", "[4]", "18446744073709551620", "4.5"}) {
    index(fmt::format(R"({{"metadata":{{"total_size":{}}},"weight_map":{{"a":"{}","b":"{}"}}}})",
                      size, shard_1, shard_2));
    EXPECT_THAT(codes(), ElementsAre("ix.total_size")) << size;
  }
  index(index_json({{"a", shard_1}}));
  EXPECT_THAT(codes(), ElementsAre("ix.gap", "format.ignored"));
  add(shard_1, safetensors_bytes({{"a", "U8", {2}, "ab"}, {"extra", "U8", {1}, "x"}}));
  index(index_json({{"a", shard_1}, {"b", shard_2}}, 4));
  EXPECT_THAT(codes(), ElementsAre("ix.unlisted"));
  EXPECT_THAT(open()->findings()[0].sources, ElementsAre("extra"));
}

// ---- split GGUF

std::string part(unsigned number, unsigned count, int tensors, const std::string& name,
                 const std::map<std::string, std::string>& texts = {}) {
  GgufWriter writer;
  writer.entry_text("general.architecture", "x");
  for (const auto& [key, text] : texts) writer.entry_text(key, text);
  writer.entry_number("split.no", GgufWriter::u16, static_cast<std::uint16_t>(number));
  writer.entry_number("split.count", GgufWriter::u16, static_cast<std::uint16_t>(count));
  writer.entry_number("split.tensors.count", GgufWriter::i32, tensors);
  return writer.tensor(name, {1}, 0, "1234").bytes();
}

class Split : public ::testing::Test {
 protected:
  Split() {
    for (unsigned i = 0; i < 3; ++i) add(i, part(i, 3, 3, fmt::format("t{}", i)));
  }
  void add(unsigned number, const std::string& bytes) {
    storage.add_file(fmt::format("/m/x-{:05}-of-00003.gguf", number + 1), bytes);
  }
  std::size_t tensors(const std::string& path) {
    return open_checkpoint(path, {.storage = &storage})->tensors().size();
  }
  std::optional<Error> error(const std::string& path = "/m/x-00001-of-00003.gguf") {
    return error_of([&] { (void)tensors(path); });
  }

  MemoryStorage storage;
};

TEST_F(Split, OpensAllPartsFromAnyOfThem) {
  EXPECT_EQ(tensors("/m/x-00001-of-00003.gguf"), 3u);
  EXPECT_EQ(tensors("/m/x-00003-of-00003.gguf"), 3u);
  EXPECT_EQ(tensors("/m"), 3u);
  EXPECT_EQ(tensors("/m/*.gguf"), 3u);
  const auto catalog = open_checkpoint("/m/x-00002-of-00003.gguf", {.storage = &storage});
  EXPECT_EQ(catalog->shards()[0].relative_path, "x-00001-of-00003.gguf");
}

// llama.cpp reads only the keys of the first part.
TEST_F(Split, MetadataAreThoseOfTheFirstPart) {
  const auto with_key = [](unsigned number, const std::string& key, const std::string& value) {
    return part(number, 3, 3, fmt::format("t{}", number), {{key, value}});
  };
  const auto findings = [&] { return open_checkpoint("/m", {.storage = &storage})->findings(); };
  add(0, with_key(0, "x.word", "first"));
  EXPECT_THAT(findings(), IsEmpty());
  add(1, with_key(1, "x.word", "first"));  // control
  EXPECT_THAT(findings(), IsEmpty());
  add(1, with_key(1, "x.word", "second"));
  add(2, with_key(2, "x.other", "third"));
  const auto catalog = open_checkpoint("/m", {.storage = &storage});
  ASSERT_EQ(catalog->findings().size(), 1u);
  EXPECT_EQ(catalog->findings()[0].code, "gg.split");
  EXPECT_EQ(catalog->findings()[0].severity, Severity::warning);
  EXPECT_THAT(catalog->findings()[0].message, HasSubstr("'x.other', 'x.word'"));
  EXPECT_EQ(std::get<std::string>(catalog->metadata().at("x.word").value), "first");
  EXPECT_FALSE(catalog->metadata().contains("x.other"));
}

TEST_F(Split, AListIsPutInOrder) {
  const auto catalog = open_checkpoint(
      std::vector<std::string>{"/m/x-00003-of-00003.gguf", "/m/x-00001-of-00003.gguf",
                               "/m/x-00002-of-00003.gguf"},
      {.storage = &storage});
  EXPECT_EQ(catalog->tensors()[0].name, "t0");
}

TEST_F(Split, PartsThatDoNotBelongTogetherAreRefused) {
  const std::vector<std::string> wrong = {part(0, 3, 3, "t1"),  // duplicate number
                                          part(1, 2, 3, "t1"),  // different count
                                          part(1, 3, 4, "t1"),  // different total
                                          part(3, 3, 3, "t1"),  // number out of range
                                          GgufWriter().tensor("t1", {1}, 0, "1234").bytes()};
  for (const std::string& bytes : wrong) {
    add(1, bytes);
    const auto problem = error();
    ASSERT_TRUE(problem);
    EXPECT_EQ(problem->code(), "gg.split") << problem->what();
    EXPECT_THAT(problem->what(), HasSubstr("x-00002-of-00003.gguf"));
  }
  add(1, part(1, 3, 3, "t0"));
  EXPECT_EQ(error()->code(), "ix.duplicate");
}

TEST_F(Split, TheTotalIsChecked) {
  for (unsigned i = 0; i < 3; ++i) add(i, part(i, 3, 5, fmt::format("t{}", i)));
  EXPECT_EQ(error()->code(), "gg.split");
  EXPECT_THAT(error()->what(), HasSubstr("split.tensors.count"));
}

TEST_F(Split, AMissingPartIsNamed) {
  MemoryStorage less;
  less.add_file("/m/x-00001-of-00003.gguf", part(0, 3, 3, "t0"));
  less.add_file("/m/x-00003-of-00003.gguf", part(2, 3, 3, "t2"));
  const std::string first = "/m/x-00001-of-00003.gguf";
  const std::string last = "/m/x-00003-of-00003.gguf";
  const OpenOptions options = {.storage = &less};
  const auto expect_named = [](const std::optional<Error>& problem) {
    ASSERT_TRUE(problem);
    EXPECT_EQ(problem->code(), "gg.split") << problem->what();
    EXPECT_EQ(problem->where().path, "/m/x-00002-of-00003.gguf");
  };
  for (const std::string& path : {std::string("/m"), first, last}) {
    expect_named(error_of([&] { (void)open_checkpoint(path, options); }));
  }
  expect_named(error_of([&] { (void)open_checkpoint(std::vector{first, last}, options); }));
}

TEST_F(Split, APartUnderAnotherNameIsRefused) {
  storage.add_file("/n/model.gguf", part(0, 3, 3, "t0"));
  EXPECT_EQ(error("/n/model.gguf")->code(), "gg.split");
  storage.add_file("/n/x-00001-of-00002.gguf", part(0, 3, 3, "t0"));
  EXPECT_EQ(error("/n/x-00001-of-00002.gguf")->code(), "gg.split");
  // A split file with one part is complete, whatever its name.
  storage.add_file("/n/whole.gguf", part(0, 1, 1, "t0"));
  EXPECT_EQ(tensors("/n/whole.gguf"), 1u);
  storage.add_file("/n/second.gguf", part(1, 1, 1, "t0"));
  EXPECT_EQ(error("/n/second.gguf")->code(), "gg.split");
  storage.add_file("/n/more.gguf", part(0, 1, 2, "t0"));
  EXPECT_EQ(error("/n/more.gguf")->code(), "gg.split");
}

}  // namespace

}  // namespace loadstone::test
