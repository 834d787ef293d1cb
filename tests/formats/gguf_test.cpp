// Tests GGUF files that break a rule in ways that the files of tests/hostile do not cover.
#include "formats/gguf.h"

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
using Writer = GgufWriter;

constexpr std::uint32_t type_f32 = 0;
constexpr std::uint32_t type_q4_0 = 2;
constexpr std::uint32_t type_q4_k = 12;

FileHeader read(const std::string& bytes) { return read_gguf(*memory_source(bytes, "/m/x.gguf")); }
FileHeader read(const Writer& writer) { return read(writer.bytes()); }

// Starts a file with one valid entry.
Writer begun() {
  Writer writer;
  writer.entry_text("general.architecture", "llama");
  return writer;
}

Writer with_first_tensor() {
  Writer writer = begun();
  writer.tensor("first", {8}, type_f32, std::string(32, '\1'));
  return writer;
}

struct Bad {
  std::string what;
  std::string bytes;
  std::string code;
  std::string culprit;
  std::string field;
};

void PrintTo(const Bad& each, std::ostream* out) { *out << each.what; }

Bad bad(std::string what, const Writer& writer, std::string code, std::string culprit,
        std::string field) {
  return {std::move(what), writer.bytes(), std::move(code), std::move(culprit), std::move(field)};
}

// Returns the bytes of an array: item type, count, items.
std::string array(std::uint32_t type, std::uint64_t count, const std::string& items) {
  return raw(type) + raw(count) + items;
}

std::vector<Bad> bad_beginnings() {
  std::vector<Bad> all;
  const std::string good = with_first_tensor().bytes();
  const auto with = [&](std::size_t at, const std::string& bytes) {
    return std::string(good).replace(at, bytes.size(), bytes);
  };
  all.push_back({"empty", "", "gg.file_too_small", "", "file"});
  for (const std::size_t size : {1, 4, 7, 8, 15, 23, 24, 31}) {
    all.push_back(
        {fmt::format("cut at {}", size), good.substr(0, size), "gg.truncated", "", "file"});
  }
  for (const char* magic : {"gguf", "GGU\1", "GGML", "RIFF"}) {
    all.push_back({magic, with(0, magic), "gg.magic", "", "magic"});
  }
  for (const char* magic : {"tjgg", "lmgg", "fmgg", "algg"}) {
    all.push_back({magic, with(0, magic), "gg.legacy", "", "magic"});
  }
  all.push_back({"reversed", with(0, "FUGG"), "gg.endian", "endian", "magic"});
  all.push_back(
      {"version 2, big-endian", with(4, raw(0x02000000u)), "gg.endian", "endian", "version"});
  for (const std::uint32_t version : {0u, 1u, 4u, 5u, 255u, 0xffffffffu}) {
    all.push_back({fmt::format("version {}", version), with(4, raw(version)), "gg.version",
                   std::to_string(version), "version"});
  }
  for (const std::uint64_t count :
       {std::uint64_t{1} << 63, UINT64_MAX, std::uint64_t{1} << 40, std::uint64_t{1000}}) {
    all.push_back(
        {fmt::format("{} tensors", count), with(8, raw(count)), "gg.count", "", "n_tensors"});
    all.push_back({fmt::format("{} entries", count), with(16, raw(count)), "gg.count", "", "n_kv"});
  }
  all.push_back({"an error page", "<html><body>no</body></html>", "gg.magic", "HTML", "magic"});
  all.push_back({"a pointer", "version https://git-lfs.github.com/spec/v1\n", "gg.lfs_pointer",
                 "git-lfs", "file"});
  all.push_back({"zeros", std::string(64, '\0'), "gg.magic", "zero", "magic"});
  return all;
}

std::vector<Bad> bad_entries() {
  std::vector<Bad> all;
  const auto key = [&](std::string what, const std::string& name, std::string code) {
    all.push_back(bad(std::move(what), begun().entry_number(name, Writer::u8, std::uint8_t{1}),
                      std::move(code), "", "key"));
  };
  key("empty key", "", "gg.key");
  key("key with a space", "a b", "gg.key");
  key("key with NUL", std::string("a\0b", 3), "gg.key");
  key("key with UTF-8", "caf\xc3\xa9", "gg.key");
  key("key without UTF-8", "a\xff", "gg.key");
  key("key with DEL", "a\x7f", "gg.key");
  all.push_back(bad("key twice", begun().entry_text("general.architecture", "x"), "gg.duplicate",
                    "general.architecture", "key"));
  for (const std::uint32_t type : {13u, 14u, 255u, 0x80000000u, 0xffffffffu}) {
    all.push_back(bad(fmt::format("type {}", type), begun().entry("my.key", type, "12345678"),
                      "gg.kv_type", "my.key", "kv type"));
    all.push_back(bad(fmt::format("items of type {}", type),
                      begun().entry("my.key", Writer::array, array(type, 1, "12345678")),
                      "gg.kv_type", "my.key", "kv array"));
  }
  for (const unsigned value : {2u, 255u}) {
    const std::string byte(1, static_cast<char>(value));
    all.push_back(bad(fmt::format("bool {}", value), begun().entry("my.key", Writer::boolean, byte),
                      "gg.bool", "my.key", "kv bool"));
    all.push_back(bad(fmt::format("array with bool {}", value),
                      begun().entry("my.key", Writer::array,
                                    array(Writer::boolean, 3, std::string("\1\0", 2) + byte)),
                      "gg.bool", "my.key", "kv bool"));
  }
  for (const std::uint64_t length : {UINT64_MAX, UINT64_MAX - 7, std::uint64_t{1} << 62,
                                     std::uint64_t{1} << 32, std::uint64_t{5000}}) {
    const std::string text = fmt::format("{}", length);
    all.push_back(bad("string of " + text,
                      begun().entry("my.key", Writer::string, raw(length) + "x"), "gg.string_len",
                      "my.key", "kv string"));
    all.push_back(
        bad("second string of " + text,
            begun().entry("my.key", Writer::array,
                          array(Writer::string, 2, Writer::text("ok") + raw(length) + "x")),
            "gg.string_len", "my.key", "kv string"));
    for (const std::uint32_t type : {Writer::u8, Writer::f64, Writer::string, Writer::array}) {
      all.push_back(bad(fmt::format("{} items of type {}", length, type),
                        begun().entry("my.key", Writer::array, array(type, length, "12345678")),
                        "gg.array_len", "my.key", "kv array"));
    }
    Writer wrong = begun();
    std::string bytes = wrong.entry_number("k", Writer::u8, std::uint8_t{1}).bytes();
    bytes.replace(bytes.size() - 4 - 1 - 1 - 8, 8, raw(length));
    all.push_back({"key of " + text, bytes, "gg.string_len", "", "key"});
  }
  const std::string one = array(Writer::u8, 1, "1");
  const std::string two = array(Writer::array, 1, one);
  all.push_back(bad("nested twice",
                    begun().entry("my.key", Writer::array, array(Writer::array, 1, two)),
                    "gg.nested_array", "my.key", "kv array"));
  all.push_back(bad("second item nested twice",
                    begun().entry("my.key", Writer::array, array(Writer::array, 2, one + two)),
                    "gg.nested_array", "my.key", "kv array"));
  Writer less = begun();
  less.more_entries = 1;
  all.push_back(bad("one entry too many", less, "gg.truncated", "", "n_kv"));
  return all;
}

std::vector<Bad> bad_known_keys() {
  std::vector<Bad> all;
  for (const std::uint32_t type : {Writer::u8, Writer::u32, Writer::i64, Writer::boolean}) {
    Writer writer;
    writer.entry("general.architecture", type,
                 std::string(type == Writer::i64   ? 8
                             : type == Writer::u32 ? 4
                                                   : 1,
                             '\1'));
    all.push_back(bad(fmt::format("architecture of type {}", type), writer, "gg.kv_type",
                      "general.architecture", "general.architecture"));
  }
  Writer list;
  list.entry("general.architecture", Writer::array,
             array(Writer::string, 1, Writer::text("llama")));
  all.push_back(bad("architecture is a list", list, "gg.kv_type", "general.architecture",
                    "general.architecture"));
  for (const std::uint32_t value : {0u, 3u, 24u, 33u, 1u << 30, 1u << 31, 0xffffffffu}) {
    all.push_back(bad(fmt::format("alignment {}", value),
                      begun().entry_number("general.alignment", Writer::u32, value), "gg.alignment",
                      "alignment", "general.alignment"));
  }
  all.push_back(bad("alignment is text", begun().entry_text("general.alignment", "32"),
                    "gg.kv_type", "alignment", "general.alignment"));
  return all;
}

std::vector<Bad> bad_tensors() {
  std::vector<Bad> all;
  const auto info = [&](std::string what, const std::vector<std::uint64_t>& dims,
                        std::uint32_t type, std::uint64_t offset, std::string code,
                        std::string field) {
    all.push_back(bad(std::move(what), with_first_tensor().info("blk.1.w", dims, type, offset),
                      std::move(code), "blk.1.w", std::move(field)));
  };
  info("5 dims", {1, 1, 1, 1, 1}, type_f32, 32, "gg.n_dims", "n_dims");
  info("a negative dim", {8, UINT64_MAX}, type_f32, 32, "gg.dims", "dims");
  info("2^63 elements", {std::uint64_t{1} << 63}, type_f32, 32, "gg.dims", "dims");
  info("a product of 2^64", {1u << 31, 1u << 31, 4}, type_f32, 32, "gg.overflow", "dims");
  info("a product of 2^64 + 4", {4294967296, 4294967296, 1, 4}, type_f32, 32, "gg.overflow",
       "dims");
  info("a product behind a 0", {0, 4294967296, 4294967296}, type_f32, 32, "gg.overflow", "dims");
  info("bytes of 2^64", {std::uint64_t{1} << 62}, type_f32, 32, "gg.overflow", "dims");
  info("a row of 31 in blocks of 32", {31}, type_q4_0, 32, "gg.block", "dims");
  info("rows of 16 that fill blocks together", {16, 2}, type_q4_0, 32, "gg.block", "dims");
  info("a row of 128 in blocks of 256", {128, 4}, type_q4_k, 32, "gg.block", "dims");
  info("a scalar in blocks", {}, type_q4_k, 32, "gg.block", "dims");
  for (const std::uint32_t type :
       {4u, 5u, 31u, 32u, 33u, 36u, 37u, 38u, 43u, 100u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
    info(fmt::format("type {}", type), {256}, type, 32, "gg.type", "ggml type");
  }
  info("Q8_1", {256}, 9, 32, "gg.no_dequant", "ggml type");
  info("Q8_K", {256}, 15, 32, "gg.no_dequant", "ggml type");
  for (const std::uint64_t offset : {std::uint64_t{33}, std::uint64_t{16}, UINT64_MAX}) {
    info(fmt::format("offset {}", offset), {1}, type_f32, offset, "gg.offset", "offset");
  }
  info("behind the file", {1}, type_f32, 1 << 20, "gg.truncated", "offset");
  info("offset near 2^64", {1}, type_f32, UINT64_MAX - 31, "gg.truncated", "offset");
  info("larger than the file", {1 << 20}, type_f32, 32, "gg.truncated", "dims");
  info("the same bytes", {8}, type_f32, 0, "gg.overlap", "offset");
  all.push_back(bad("partly the same bytes",
                    begun()
                        .info("a", {16}, type_f32, 0)
                        .info("blk.1.w", {8}, type_f32, 32)
                        .data(std::string(64, 'x')),
                    "gg.overlap", "blk.1.w", "offset"));
  all.push_back(bad("name twice", with_first_tensor().tensor("first", {1}, type_f32, "1234"),
                    "gg.duplicate", "first", "tensor name"));
  all.push_back(bad("NUL in a name",
                    with_first_tensor().tensor(std::string("blk\0w", 5), {1}, type_f32, "1234"),
                    "gg.name", "blk", "tensor name"));
  for (const char* name : {"\xff", "a\xc0\x80", "\xed\xa0\x80"}) {
    all.push_back(bad("no UTF-8", with_first_tensor().tensor(name, {1}, type_f32, "1234"),
                      "gg.utf8", "", "tensor name"));
  }
  return all;
}

std::vector<Bad> all_bad() {
  std::vector<Bad> all;
  for (const auto& some : {bad_beginnings(), bad_entries(), bad_known_keys(), bad_tensors()}) {
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

class GgufRefused : public ::testing::TestWithParam<Bad> {};

TEST_P(GgufRefused, WithItsCodeAndTheCulprit) {
  const Bad& test = GetParam();
  const auto error = error_of([&] { (void)read(test.bytes); });
  ASSERT_TRUE(error) << "accepted";
  EXPECT_EQ(error->code(), test.code) << error->what();
  EXPECT_EQ(error->where().path, "/m/x.gguf");
  EXPECT_THAT(error->what(), HasSubstr(test.culprit));
  EXPECT_THAT(error->what(), HasSubstr(test.field));
}

INSTANTIATE_TEST_SUITE_P(Rules, GgufRefused, ::testing::ValuesIn(all_bad()));

// ---- accepted files

TEST(Gguf, ReadsAllTypesOfMetadata) {
  Writer writer = begun();
  writer.entry_number("u8", Writer::u8, std::uint8_t{200});
  writer.entry_number("i8", Writer::i8, std::int8_t{-3});
  writer.entry_number("u16", Writer::u16, std::uint16_t{60000});
  writer.entry_number("i16", Writer::i16, std::int16_t{-300});
  writer.entry_number("u32", Writer::u32, std::uint32_t{4000000000u});
  writer.entry_number("i32", Writer::i32, std::int32_t{-70000});
  writer.entry_number("f32", Writer::f32, 1.5f);
  writer.entry_number("bool", Writer::boolean, std::uint8_t{1});
  writer.entry_number("u64", Writer::u64, UINT64_MAX);
  writer.entry_number("i64", Writer::i64, std::int64_t{-5'000'000'000});
  writer.entry_number("f64", Writer::f64, -0.25);
  writer.entry(
      "strings", Writer::array,
      array(Writer::string, 3, Writer::text("a") + Writer::text("") + Writer::text("ccc")));
  writer.entry("numbers", Writer::array, array(Writer::i16, 2, raw_all<std::int16_t>({-1, 2})));
  writer.entry("none", Writer::array, array(Writer::f32, 0, ""));
  const FileHeader header = read(writer);
  const auto value = [&](const char* key) -> const auto& { return header.metadata.at(key).value; };
  EXPECT_EQ(std::get<std::uint64_t>(value("u8")), 200u);
  EXPECT_EQ(std::get<std::int64_t>(value("i8")), -3);
  EXPECT_EQ(std::get<std::uint64_t>(value("u16")), 60000u);
  EXPECT_EQ(std::get<std::int64_t>(value("i16")), -300);
  EXPECT_EQ(std::get<std::uint64_t>(value("u32")), 4000000000u);
  EXPECT_EQ(std::get<std::int64_t>(value("i32")), -70000);
  EXPECT_EQ(std::get<double>(value("f32")), 1.5);
  EXPECT_EQ(std::get<bool>(value("bool")), true);
  EXPECT_EQ(std::get<std::uint64_t>(value("u64")), UINT64_MAX);
  EXPECT_EQ(std::get<std::int64_t>(value("i64")), -5'000'000'000);
  EXPECT_EQ(std::get<double>(value("f64")), -0.25);
  EXPECT_EQ(type_name(header.metadata.at("u16")), "u16");
  EXPECT_EQ(type_name(header.metadata.at("strings")), "array of string");
  std::vector<std::string> strings;
  for (const MetadataValue& each : std::get<MetadataArray>(value("strings"))) {
    strings.push_back(std::get<std::string>(each.value));
  }
  EXPECT_THAT(strings, ElementsAre("a", "", "ccc"));
  const auto numbers = std::get<MetadataArray>(value("numbers"));
  ASSERT_EQ(numbers.size(), 2u);
  EXPECT_EQ(std::get<std::int64_t>(numbers[0].value), -1);
  EXPECT_TRUE(std::get<MetadataArray>(value("none")).empty());
  EXPECT_THAT(header.findings, IsEmpty());
}

struct TypeRow {
  std::uint32_t id;
  const char* name;
  std::uint64_t elements;
  std::size_t bytes;
};

TEST(Gguf, KnowsTheSizeOfEveryType) {
  const std::vector<TypeRow> rows = {
      {0, "F32", 1, 4},         {1, "F16", 1, 2},         {2, "Q4_0", 32, 18},
      {3, "Q4_1", 32, 20},      {6, "Q5_0", 32, 22},      {7, "Q5_1", 32, 24},
      {8, "Q8_0", 32, 34},      {10, "Q2_K", 256, 84},    {11, "Q3_K", 256, 110},
      {12, "Q4_K", 256, 144},   {13, "Q5_K", 256, 176},   {14, "Q6_K", 256, 210},
      {16, "IQ2_XXS", 256, 66}, {17, "IQ2_XS", 256, 74},  {18, "IQ3_XXS", 256, 98},
      {19, "IQ1_S", 256, 50},   {20, "IQ4_NL", 32, 18},   {21, "IQ3_S", 256, 110},
      {22, "IQ2_S", 256, 82},   {23, "IQ4_XS", 256, 136}, {24, "I8", 1, 1},
      {25, "I16", 1, 2},        {26, "I32", 1, 4},        {27, "I64", 1, 8},
      {28, "F64", 1, 8},        {29, "IQ1_M", 256, 56},   {30, "BF16", 1, 2},
      {34, "TQ1_0", 256, 54},   {35, "TQ2_0", 256, 66},   {39, "MXFP4", 32, 17},
      {40, "NVFP4", 64, 36},    {41, "Q1_0", 128, 18},    {42, "Q2_0", 64, 18}};
  Writer writer = begun();
  for (const TypeRow& row : rows) {
    writer.tensor(row.name, {2 * row.elements, 3}, row.id, some_bytes(6 * row.bytes));
  }
  const FileHeader header = read(writer);
  ASSERT_EQ(header.tensors.size(), rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(header.tensors[i].encoding.name(), rows[i].name);
    EXPECT_EQ(header.tensors[i].byte_count(), 6 * rows[i].bytes) << rows[i].name;
    EXPECT_EQ(header.tensors[i].shape, (Shape{3, 2 * rows[i].elements}));
  }
}

TEST(Gguf, ReversesDimsAndPlacesData) {
  Writer writer;
  writer.alignment = 64;
  writer.entry_number("general.alignment", Writer::u32, std::uint32_t{64});
  writer.tensor("a", {2, 3, 4}, type_f32, std::string(96, 'a'));
  writer.tensor("b", {1}, type_f32, "bbbb");
  const FileHeader header = read(writer);
  EXPECT_EQ(header.tensors[0].shape, (Shape{4, 3, 2}));
  EXPECT_EQ(header.shard.data_begin % 64, 0u);
  const std::string bytes = writer.bytes();
  EXPECT_EQ(bytes.substr(header.tensors[1].offset_begin, 4), "bbbb");
  EXPECT_THAT(header.findings, IsEmpty());
}

struct Warned {
  Writer writer;
  std::string code;
};

TEST(Gguf, UnusualFilesAreToldAndRead) {
  std::vector<Warned> files;
  files.push_back(
      {begun().entry("k", Writer::array, array(Writer::array, 1, array(Writer::u8, 1, "1"))),
       "gg.nested_array"});
  files.push_back({begun().entry_text("k", "\xff\xfe"), "gg.utf8"});
  files.push_back(
      {begun().entry("k", Writer::array,
                     array(Writer::string, 2, Writer::text("\xff") + Writer::text("\xfe"))),
       "gg.utf8"});
  files.push_back({begun().entry_text(std::string(65536, 'k'), "v"), "gg.key"});
  files.push_back(
      {begun().entry_number("general.alignment", Writer::u32, std::uint32_t{4}), "gg.alignment"});
  files.push_back({begun().tensor("", {1}, type_f32, "1234"), "gg.name"});
  files.push_back({begun().tensor(std::string(64, 'n'), {1}, type_f32, "1234"), "gg.name"});
  files.push_back({begun().tensor("a\tb", {1}, type_f32, "1234"), "gg.name"});
  files.push_back({begun().tensor("scalar", {}, type_f32, "1234"), "gg.n_dims"});
  files.push_back({begun().tensor("none", {4, 0}, type_f32, ""), "gg.dims"});
  files.push_back({begun().info("late", {1}, type_f32, 64).data(std::string(96, 'x')), "gg.hole"});
  files.push_back({with_first_tensor().data(std::string(33, 'x')), "gg.trailing"});
  for (const Warned& each : files) {
    const FileHeader header = read(each.writer);
    ASSERT_EQ(header.findings.size(), 1u) << each.code;
    EXPECT_EQ(header.findings[0].code, each.code);
    EXPECT_EQ(header.findings[0].severity, Severity::warning);
  }
}

// A valid key may raise the limit on dims but never lowers the caller's limit.
TEST(Gguf, AFileDeclaresItsNumberOfDims) {
  const auto file = [](std::uint32_t type, auto value, std::size_t rank) {
    Writer writer = begun().entry_number(gguf_rank_key, type, value);
    writer.tensor("video", std::vector<std::uint64_t>(rank, 1), type_f32, "1234");
    return writer.bytes();
  };
  const auto code = [](const std::string& bytes) { return code_of([&] { (void)read(bytes); }); };
  EXPECT_EQ(read(file(Writer::u32, 5u, 5)).tensors.at(0).shape.rank(), 5u);
  EXPECT_EQ(read(file(Writer::u32, 8u, 8)).tensors.at(0).shape.rank(), 8u);
  EXPECT_EQ(read(file(Writer::u32, 1u, 4)).tensors.at(0).shape.rank(), 4u);
  EXPECT_EQ(code(file(Writer::u32, 5u, 6)), "gg.n_dims");
  for (const std::uint32_t value : {0u, 9u, 1u << 31, UINT32_MAX}) {
    EXPECT_EQ(code(file(Writer::u32, value, 4)), "gg.n_dims") << value;
  }
  EXPECT_EQ(code(file(Writer::i32, std::int32_t{5}, 4)), "gg.kv_type");
  EXPECT_EQ(code(file(Writer::u64, std::uint64_t{5}, 4)), "gg.kv_type");
  EXPECT_EQ(code(begun().entry_text(gguf_rank_key, "5").bytes()), "gg.kv_type");
  const auto error = error_of([&] {
    (void)read(begun().tensor("video", {1, 1, 1, 1, 1}, type_f32, "1234"));
  });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), "gg.n_dims");
  EXPECT_THAT(error->what(), HasSubstr("--gguf-rank-max 5"));
}

TEST(Gguf, TheTailNeedsNoPadding) {
  Writer writer = begun();
  writer.tensor("a", {3}, type_f32, "123456789012");
  writer.pad_tail = false;
  EXPECT_THAT(read(writer).findings, IsEmpty());
  std::string bytes = writer.bytes();
  bytes.pop_back();
  const auto error = error_of([&] { (void)read(bytes); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), "gg.truncated");
  EXPECT_EQ(error->where().tensor, "a");
}

// The vocabulary is much larger than the reader's buffer.
Writer with_vocabulary(std::size_t tokens) {
  Writer writer = begun();
  std::string items;
  for (std::size_t i = 0; i < tokens; ++i) items += Writer::text(fmt::format("token{}", i));
  writer.entry("tokenizer.ggml.tokens", Writer::array, array(Writer::string, tokens, items));
  writer.entry("tokenizer.ggml.scores", Writer::array,
               array(Writer::f32, tokens, std::string(4 * tokens, '\0')));
  writer.entry_number("last.key", Writer::u8, std::uint8_t{9});
  writer.tensor("a", {8}, type_f32, std::string(32, 'd'));
  return writer.tensor("b", {8}, type_f32, std::string(32, 'e'));
}

TEST(Gguf, ReadsNoByteOfDataAndFewPieces) {
  for (const std::size_t tokens : {std::size_t{0}, std::size_t{1}, std::size_t{200'000}}) {
    MemoryStorage memory;
    memory.add_file("/x.gguf", with_vocabulary(tokens).bytes());
    LoggingStorage logged(memory);
    const FileHeader header = read_gguf(*logged.open("/x.gguf"));
    const auto& array = std::get<MetadataArray>(header.metadata.at("tokenizer.ggml.tokens").value);
    ASSERT_EQ(array.size(), tokens);
    if (tokens > 0) {
      EXPECT_EQ(std::get<std::string>(array[tokens - 1].value), fmt::format("token{}", tokens - 1));
    }
    EXPECT_EQ(std::get<std::uint64_t>(header.metadata.at("last.key").value), 9u);
    for (const Access& access : logged.accesses()) {
      EXPECT_LE(access.offset + access.bytes, header.shard.data_begin);
    }
    EXPECT_LE(logged.accesses().size(), 200u);
  }
}

TEST(Gguf, TheDigestIsOfAllBeforeTheData) {
  const auto digest = [](std::string bytes, std::size_t changed) {
    bytes[changed] = static_cast<char>(bytes[changed] ^ 1);
    return read(bytes).shard.header_digest;
  };
  const std::string bytes = with_vocabulary(1000).bytes();
  const std::string plain = read(bytes).shard.header_digest;
  const std::size_t token = bytes.find("token999");
  EXPECT_NE(digest(bytes, token), plain);
  EXPECT_EQ(digest(bytes, bytes.size() - 1), plain);
  EXPECT_EQ(plain.size(), 32u);
}

TEST(GgufSplitInfo, IsReadFromAnyInteger) {
  Writer writer = begun();
  EXPECT_FALSE(gguf_split(read(writer)));
  writer.entry_number("split.no", Writer::u16, std::uint16_t{1});
  writer.entry_number("split.count", Writer::i32, std::int32_t{3});
  writer.entry_number("split.tensors.count", Writer::u64, std::uint64_t{7});
  const auto split = gguf_split(read(writer));
  ASSERT_TRUE(split);
  EXPECT_EQ(split->number, 1u);
  EXPECT_EQ(split->count, 3u);
  EXPECT_EQ(split->tensors, 7u);
  EXPECT_EQ(code_of([] { (void)gguf_split(read(begun().entry_text("split.count", "3"))); }),
            "gg.kv_type");
  EXPECT_EQ(
      code_of([] {
        (void)gguf_split(read(begun().entry_number("split.count", Writer::i16, std::int16_t{-1})));
      }),
      "gg.split");
  // llama.cpp writes this key to files that it merged.
  EXPECT_FALSE(
      gguf_split(read(begun().entry_number("split.count", Writer::u16, std::uint16_t{0}))));
}

}  // namespace

}  // namespace loadstone::test
