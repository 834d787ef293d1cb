// Tests headers that break a rule in ways that the files of tests/hostile do not cover, such as in
// the second tensor or under unusual names.
#include "formats/safetensors.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include "support/errors.h"
#include "support/files.h"
#include "support/memory_storage.h"
#include "support/watched_storage.h"

namespace loadstone::test {

namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

FileHeader read(const std::string& bytes) {
  return read_safetensors(*memory_source(bytes, "/m/x.safetensors"));
}

struct BadHeader {
  std::string what;
  std::string header;
  std::string data;
  std::string code;
  std::string culprit;
  std::string field;
};

void PrintTo(const BadHeader& each, std::ostream* out) { *out << each.what; }

std::string with_fields(std::string_view fields) {
  return fmt::format(
      R"({{"first":{{"dtype":"U8","shape":[2],"data_offsets":[0,2]}},"se/cond":{{{}}}}})", fields);
}

std::string with_entry(std::string_view entry) {
  return fmt::format(R"({{"first":{{"dtype":"U8","shape":[2],"data_offsets":[0,2]}},{}}})", entry);
}

const std::string six = "123456";  // 2 bytes for "first", 4 for the second tensor

const std::string good = R"("dtype":"U8","shape":[4],"data_offsets":[2,6])";

BadHeader fields(std::string what, std::string text, std::string code, std::string field) {
  return {std::move(what), with_fields(text), six, std::move(code), "se/cond", std::move(field)};
}

std::vector<BadHeader> bad_numbers() {
  std::vector<BadHeader> all;
  for (const char* token : {"-1", "2.0", "1e1", "18446744073709551616", "true", "null", R"("2")",
                            "[2]", "{}", "99999999999999999999999999", "-0", "0.5", "2E0"}) {
    all.push_back(fields(fmt::format("shape {}", token),
                         fmt::format(R"("dtype":"U8","shape":[{}],"data_offsets":[2,6])", token),
                         "st.shape", "shape"));
    all.push_back(fields(fmt::format("begin {}", token),
                         fmt::format(R"("dtype":"U8","shape":[4],"data_offsets":[{},6])", token),
                         "st.offsets", "data_offsets"));
    all.push_back(fields(fmt::format("end {}", token),
                         fmt::format(R"("data_offsets":[2,{}],"dtype":"U8","shape":[4])", token),
                         "st.offsets", "data_offsets"));
  }
  for (const char* token : {"4", "null", "true", R"("4")", "{}", R"({"0":4})"}) {
    all.push_back(fields(fmt::format("shape is {}", token),
                         fmt::format(R"("dtype":"U8","shape":{},"data_offsets":[2,6])", token),
                         "st.shape", "shape"));
    all.push_back(fields(fmt::format("offsets are {}", token),
                         fmt::format(R"("dtype":"U8","shape":[4],"data_offsets":{})", token),
                         "st.offsets", "data_offsets"));
  }
  for (const char* token : {"[]", "[2]", "[2,6,6]", "[6,2]"}) {
    all.push_back(fields(fmt::format("offsets {}", token),
                         fmt::format(R"("dtype":"U8","shape":[4],"data_offsets":{})", token),
                         "st.offsets", "data_offsets"));
  }
  return all;
}

std::vector<BadHeader> bad_dtypes() {
  std::vector<BadHeader> all;
  for (const char* token :
       {"1", "null", R"(["U8"])", R"("u8")", R"("")", R"("U8 ")", R"("F16\u0000")", R"("float32")",
        R"("Q4_K")", R"("F8_E4M3FN")", R"("BF_16")"}) {
    all.push_back(fields(fmt::format("dtype {}", token),
                         fmt::format(R"("dtype":{},"shape":[4],"data_offsets":[2,6])", token),
                         "st.dtype", "dtype"));
  }
  return all;
}

std::vector<BadHeader> bad_json() {
  std::vector<BadHeader> all;
  for (const char* token : {"nul",
                            "tru",
                            "True",
                            "NaN",
                            "Infinity",
                            "-Infinity",
                            "+1",
                            "01",
                            ".5",
                            "1.",
                            "0x10",
                            "1_0",
                            "'a'",
                            "1 2",
                            "-",
                            "1e",
                            "undefined",
                            "[1,]",
                            "[,1]",
                            "[1}",
                            "{\"a\"}",
                            "{\"a\":}",
                            "{\"a\":1,}",
                            "{a:1}",
                            "",
                            R"("\x")",
                            R"("\ud800")",
                            R"("\udc00")",
                            R"("\ud800\u0041")",
                            R"("\u12")"}) {
    all.push_back(
        fields(fmt::format("JSON {}", token),
               fmt::format(R"("dtype":"U8","shape":[4],"data_offsets":[2,6],"x":{})", token),
               "st.header_json", ""));
    all.push_back(fields(fmt::format("JSON in shape {}", token),
                         fmt::format(R"("dtype":"U8","shape":[{}],"data_offsets":[2,6])",
                                     *token == '\0' ? "," : token),
                         "st.header_json", ""));
  }
  return all;
}

std::vector<BadHeader> bad_fields() {
  std::vector<BadHeader> all;
  const std::vector<std::pair<std::string, std::string>> missing = {
      {"dtype", R"("shape":[4],"data_offsets":[2,6])"},
      {"shape", R"("dtype":"U8","data_offsets":[2,6])"},
      {"data_offsets", R"("shape":[4],"dtype":"U8")"}};
  for (const auto& [field, text] : missing) {
    all.push_back(fields("no " + field, text, "st.field_missing", field));
  }
  for (const auto& [field, again] :
       std::vector<std::pair<std::string, std::string>>{{"dtype", R"("dtype":"U8")"},
                                                        {"shape", R"("shape":[4])"},
                                                        {"data_offsets", R"("data_offsets":[2,6])"},
                                                        {"dtype", R"("\u0064type":"U8")"}}) {
    all.push_back(fields("twice " + again, good + "," + again, "st.duplicate", field));
  }
  all.push_back(fields("extra twice", good + R"(,"x":1,"x":2)", "st.duplicate", "x"));
  return all;
}

std::vector<BadHeader> bad_sizes() {
  std::vector<BadHeader> all;
  all.push_back(fields("wraps to 4",
                       R"("dtype":"I16","shape":[9223372036854775810],"data_offsets":[2,6])",
                       "st.overflow", "shape"));
  all.push_back(fields("product wraps to 4",
                       R"("dtype":"U8","shape":[4294967296,4294967296,4],"data_offsets":[2,6])",
                       "st.overflow", "shape"));
  all.push_back(fields("product wraps behind a 0",
                       R"("dtype":"U8","shape":[0,4294967296,4294967297],"data_offsets":[2,2])",
                       "st.overflow", "shape"));
  all.push_back(fields("too large", R"("dtype":"U16","shape":[4],"data_offsets":[2,6])",
                       "st.size_mismatch", "shape"));
  all.push_back(fields("too small", R"("dtype":"U8","shape":[3],"data_offsets":[2,6])",
                       "st.size_mismatch", "shape"));
  all.push_back(fields("scalar in 4", R"("dtype":"U8","shape":[],"data_offsets":[2,6])",
                       "st.size_mismatch", "shape"));
  all.push_back(
      fields("odd F4", R"("dtype":"F4","shape":[7],"data_offsets":[2,6])", "st.subbyte", "shape"));
  all.push_back(fields("odd F6_E2M3", R"("dtype":"F6_E2M3","shape":[5],"data_offsets":[2,6])",
                       "st.subbyte", "shape"));
  all.push_back(fields("odd F6_E3M2", R"("dtype":"F6_E3M2","shape":[2,3],"data_offsets":[2,6])",
                       "st.subbyte", "shape"));
  all.push_back(fields("cut", R"("dtype":"U8","shape":[5],"data_offsets":[2,7])", "st.truncated",
                       "data_offsets"));
  all.push_back(fields(
      "cut near 2^64",
      R"("dtype":"U8","shape":[18446744073709551613],"data_offsets":[2,18446744073709551615])",
      "st.truncated", "data_offsets"));
  all.push_back(fields("hole", R"("dtype":"U8","shape":[3],"data_offsets":[3,6])", "st.hole",
                       "data_offsets"));
  all.push_back(fields("overlap", R"("dtype":"U8","shape":[5],"data_offsets":[1,6])", "st.overlap",
                       "data_offsets"));
  all.push_back(fields("inside", R"("dtype":"U8","shape":[1],"data_offsets":[1,2])", "st.overlap",
                       "data_offsets"));
  all.push_back(fields("empty, but in the middle",
                       R"("dtype":"U8","shape":[0],"data_offsets":[1,1])", "st.overlap",
                       "data_offsets"));
  return all;
}

std::vector<BadHeader> bad_entries() {
  std::vector<BadHeader> all;
  for (const char* entry : {"[]", "7", R"("U8")", "null", "true", "[[[1]]]"}) {
    all.push_back({fmt::format("entry {}", entry),
                   with_entry(fmt::format(R"("se/cond":{})", entry)), six, "st.entry", "se/cond",
                   "header"});
  }
  const std::string again = safetensors_entry("first", "U8", {4}, 2, 6);
  all.push_back({"name twice", with_entry(again), six, "st.duplicate", "first", "header"});
  all.push_back({"name twice, spelled otherwise",
                 with_entry(R"("\u0066irst":{"dtype":"U8","shape":[4],"data_offsets":[2,6]})"), six,
                 "st.duplicate", "first", "header"});
  return all;
}

std::vector<BadHeader> bad_metadata() {
  std::vector<BadHeader> all;
  for (const char* metadata : {"[]", "7", R"("a")", "true"}) {
    all.push_back({fmt::format("metadata {}", metadata),
                   with_entry(fmt::format(R"("__metadata__":{})", metadata)), "12", "st.metadata",
                   "__metadata__", "__metadata__"});
  }
  for (const char* value : {"[]", "7", "null", "true", "1.5", R"({"a":"b"})", R"(["b"])"}) {
    all.push_back({fmt::format("metadata value {}", value),
                   with_entry(fmt::format(R"("__metadata__":{{"ok":"1","kk":{}}})", value)), "12",
                   "st.metadata", "kk", "__metadata__"});
  }
  all.push_back({"metadata key twice", with_entry(R"("__metadata__":{"kk":"1","kk":"1"})"), "12",
                 "st.duplicate", "kk", "__metadata__"});
  all.push_back({"metadata twice, apart",
                 R"({"__metadata__":{},"first":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                 R"("__metadata__":{}})",
                 "12", "st.duplicate", "__metadata__", "__metadata__"});
  return all;
}

std::vector<BadHeader> bad_documents() {
  std::vector<BadHeader> all;
  for (const char* header :
       {"[]", "7", R"("a")", "null", "true", "{", "{}}", "{} {}", "{},", "{}\n", "{}\t", "{}x",
        R"({"a")", R"({"a":)", "{,}", "{}\"", "}", "{]"}) {
    all.push_back({fmt::format("header {}", header), header, "",
                   *header == '}' ? "st.header_start" : "st.header_json", "", "header"});
  }
  all.push_back({"NUL behind", std::string("{}\0\0", 4), "", "st.header_json", "", "header"});
  for (const char* header : {" {}", "\n{}", "\t{}", "\xef\xbb\xbf{}", ",{}", "\x01{}"}) {
    all.push_back({"starts otherwise", header, "", "st.header_start", "", "header"});
  }
  for (const char* header : {"{\"\xff\":{}}", "{\"a\xc0\x80\":1}", "{\"\xed\xa0\x80\":1}",
                             "{\"\xf4\x90\x80\x80\":1}", "{}\x80"}) {
    all.push_back({"no UTF-8", header, "", "st.header_utf8", "", "header"});
  }
  std::string deep = R"({"a":{"dtype":"U8","x":)" + std::string(5000, '[') + std::string(5000, ']');
  all.push_back({"deep in an extra field", deep + "}}", "", "st.header_json", "a", "x"});
  deep = R"({"__metadata__":{"a":)";
  for (int i = 0; i < 5000; ++i) deep += R"({"a":)";
  all.push_back({"deep in metadata", deep + "1" + std::string(5002, '}'), "", "st.header_json",
                 "__metadata__", "header"});
  all.push_back({"deep and cut", R"({"a":)" + std::string(50000, '[') + "}", "", "st.header_json",
                 "", "header"});
  all.push_back({"trailing", with_fields(good), six + "7", "st.trailing", "", "file"});
  all.push_back({"trailing behind nothing", "{}", "x", "st.trailing", "", "file"});
  return all;
}

std::vector<BadHeader> bad_headers() {
  std::vector<BadHeader> all;
  for (const auto& some : {bad_numbers(), bad_dtypes(), bad_json(), bad_fields(), bad_sizes(),
                           bad_entries(), bad_metadata(), bad_documents()}) {
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

class Refused : public ::testing::TestWithParam<BadHeader> {};

TEST_P(Refused, WithItsCodeAndTheCulprit) {
  const BadHeader& test = GetParam();
  const auto error = error_of([&] { (void)read(safetensors_raw(test.header, test.data)); });
  ASSERT_TRUE(error) << "accepted: " << test.header.substr(0, 200);
  EXPECT_EQ(error->code(), test.code) << error->what();
  EXPECT_EQ(error->where().path, "/m/x.safetensors");
  EXPECT_THAT(error->what(), HasSubstr(test.culprit));
  EXPECT_THAT(error->what(), HasSubstr(test.field));
  EXPECT_TRUE(error->where().byte_offset) << error->what();
}

INSTANTIATE_TEST_SUITE_P(Rules, Refused, ::testing::ValuesIn(bad_headers()));

TEST(Safetensors, ReadsEveryDtype) {
  const std::map<std::string, std::pair<std::uint64_t, std::size_t>> dtypes = {
      {"BOOL", {2, 2}},    {"U8", {2, 2}},          {"I8", {2, 2}},          {"U16", {2, 4}},
      {"I16", {2, 4}},     {"U32", {2, 8}},         {"I32", {2, 8}},         {"U64", {2, 16}},
      {"I64", {2, 16}},    {"F16", {2, 4}},         {"BF16", {2, 4}},        {"F32", {2, 8}},
      {"F64", {2, 16}},    {"C64", {2, 16}},        {"F8_E4M3", {2, 2}},     {"F8_E5M2", {2, 2}},
      {"F8_E8M0", {2, 2}}, {"F8_E4M3FNUZ", {2, 2}}, {"F8_E5M2FNUZ", {2, 2}}, {"F6_E2M3", {8, 6}},
      {"F6_E3M2", {4, 3}}, {"F4", {6, 3}}};
  std::vector<FileTensor> tensors;
  for (const auto& [dtype, size] : dtypes) {
    tensors.push_back({"t." + dtype, dtype, {size.first}, some_bytes(size.second)});
  }
  const FileHeader header = read(safetensors_bytes(tensors));
  ASSERT_EQ(header.tensors.size(), 22u);
  for (const TensorInfo& tensor : header.tensors) {
    EXPECT_EQ("t." + std::string(tensor.encoding.name()), tensor.name);
    EXPECT_EQ(tensor.byte_count(), dtypes.at(std::string(tensor.encoding.name())).second);
  }
  EXPECT_THAT(header.findings, IsEmpty());
}

TEST(Safetensors, GivesFileOrderShapesAndAbsoluteOffsets) {
  const std::string header = R"({"late":{"shape":[],"data_offsets":[4,8],"dtype":"F32"},)"
                             R"("none":{"dtype":"F64","shape":[3,0],"data_offsets":[4,4]},)"
                             R"("early":{"dtype":"U8","shape":[1,4],"data_offsets":[0,4]},)"
                             R"("__metadata__":{"k":"v","\u00e9":"\ud83d\ude00"}}  )";
  const FileHeader read_back = read(safetensors_raw(header, "12345678"));
  std::vector<std::string> rows;
  for (const TensorInfo& t : read_back.tensors) {
    rows.push_back(
        fmt::format("{} {} {} {}", t.name, t.shape.text(), t.offset_begin, t.offset_end));
  }
  const std::uint64_t data = 8 + header.size();
  EXPECT_THAT(rows, ElementsAre(fmt::format("early [1, 4] {} {}", data, data + 4),
                                fmt::format("none [3, 0] {} {}", data + 4, data + 4),
                                fmt::format("late [] {} {}", data + 4, data + 8)));
  EXPECT_EQ(read_back.shard.data_begin, data);
  EXPECT_EQ(std::get<std::string>(read_back.metadata.at("k").value), "v");
  EXPECT_EQ(std::get<std::string>(read_back.metadata.at("\xc3\xa9").value), "\xf0\x9f\x98\x80");
}

TEST(Safetensors, TheDigestIsOfTheHeaderAlone) {
  const auto digest = [](const std::string& name, const std::string& data) {
    return read(safetensors_bytes({{name, "U8", {2}, data}})).shard.header_digest;
  };
  EXPECT_EQ(digest("a", "12"), digest("a", "34"));
  EXPECT_NE(digest("a", "12"), digest("b", "12"));
  EXPECT_EQ(digest("a", "12").size(), 32u);
}

TEST(Safetensors, ReadsNoByteOfData) {
  MemoryStorage memory;
  memory.add_file("/x.safetensors", safetensors_bytes({{"a", "U8", {4}, "1234"}}));
  LoggingStorage logged(memory);
  const FileHeader header = read_safetensors(*logged.open("/x.safetensors"));
  ASSERT_FALSE(logged.accesses().empty());
  for (const Access& access : logged.accesses()) {
    EXPECT_LE(access.offset + access.bytes, std::max<std::uint64_t>(header.shard.data_begin, 9));
  }
}

struct Warned {
  std::string name;
  std::string code;
};

TEST(Safetensors, UnusualNamesAreToldAndKept) {
  const std::vector<Warned> names = {{"", "st.name"},
                                     {std::string("a\0b", 3), "st.name"},
                                     {"a\nb", "st.name"},
                                     {"\x1b[31mred", "st.name"},
                                     {std::string(2000, 'n'), "st.name"},
                                     {"../up", "st.name"},
                                     {"a/../../up", "st.name"},
                                     {"/etc/passwd", "st.name"}};
  for (const Warned& each : names) {
    const FileHeader header = read(safetensors_bytes({{each.name, "U8", {1}, "1"}}));
    ASSERT_EQ(header.tensors.size(), 1u);
    EXPECT_EQ(header.tensors[0].name, each.name);
    ASSERT_EQ(header.findings.size(), 1u) << each.name;
    EXPECT_EQ(header.findings[0].code, each.code);
    EXPECT_EQ(header.findings[0].severity, Severity::warning);
    EXPECT_THAT(header.findings[0].sources, ElementsAre(each.name));
  }
  for (const char* name : {"a..b", "a/b", "\xc3\xa9\xe4\xb8\xad", "weight ", "__metadata__x"}) {
    EXPECT_THAT(read(safetensors_bytes({{name, "U8", {1}, "1"}})).findings, IsEmpty()) << name;
  }
}

TEST(Safetensors, ManyWarningsAreCounted) {
  std::vector<FileTensor> tensors;
  for (int i = 0; i < 1000; ++i) tensors.push_back({fmt::format("../{}", i), "U8", {1}, "1"});
  const FileHeader header = read(safetensors_bytes(tensors));
  ASSERT_EQ(header.findings.size(), Warnings::per_code_max + 1);
  EXPECT_THAT(header.findings.back().message, HasSubstr("900 more"));
}

TEST(Safetensors, LengthsAreCheckedAgainstFileAndLimit) {
  const auto with_length = [](std::uint64_t length, std::size_t bytes) {
    return code_of([&] { (void)read(raw(length) + "{" + std::string(bytes, ' ')); });
  };
  EXPECT_EQ(with_length(100, 98), "st.header_len");
  EXPECT_EQ(with_length(100'000'000, 98), "st.header_len");
  EXPECT_EQ(with_length(100'000'001, 98), "st.header_too_large");
  EXPECT_EQ(with_length(UINT64_MAX, 98), "st.header_too_large");
  EXPECT_EQ(with_length(UINT64_MAX - 7, 98), "st.header_too_large");
  EXPECT_EQ(code_of([] { (void)read("12345678"); }), "st.not_safetensors");
  for (std::size_t bytes = 0; bytes < 8; ++bytes) {
    EXPECT_EQ(code_of([&] { (void)read(std::string(bytes, '\0')); }), "st.file_too_small");
  }
}

TEST(Safetensors, OtherFilesAreToldByName) {
  const std::vector<std::pair<std::string, std::string>> files = {
      {"<!doctype HTML><html>", "HTML"},
      {"\n <HTML><body>404 Not Found</body>", "HTML"},
      {"<?xml version=\"1.0\"?><Error/>", "HTML"},
      {std::string("PK\3\4\x14\0\0\0\x08\0abcdefghijkl", 22), "zip"},
      {std::string("\x1f\x8b\x08\0\x11\x22\x33\x44\0\x03rest of it", 20), "archive"},
      {"\x89HDF\r\n\x1a\n and more", "HDF5"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "git-lfs"},
      {std::string(100, '\0'), "zero"},
      {std::string(100000, '\0'), "zero"},
      {"GGUF\3\0\0\0" + std::string(40, '\0'), "GGUF"},
      {std::string("\x80\2}q\0X\6\0\0\0weight", 16), "pickle"},
      {"{\"error\":\"Repository not found\"}", "text"}};
  for (const auto& [bytes, word] : files) {
    const auto error = error_of([&] { (void)read(bytes); });
    ASSERT_TRUE(error) << word;
    EXPECT_EQ(error->code(), "st.not_safetensors") << word;
    EXPECT_THAT(error->what(), HasSubstr(word));
  }
  // Control: a valid header whose length looks like the start of a zip archive.
  const std::uint64_t zip_like = 0x04034b50;
  EXPECT_EQ(code_of([&] { (void)read(raw(zip_like) + "{}"); }), "st.header_len");
}

}  // namespace

}  // namespace loadstone::test
