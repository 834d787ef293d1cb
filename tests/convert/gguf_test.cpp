// Tests GGUF files as output of conversions. Other files test the encodings.
#include "formats/gguf.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>
#include <limits>

#include "loadstone/convert.h"
#include "loadstone/error.h"
#include "loadstone/verify.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/samples.h"

namespace loadstone::test {

namespace {

using namespace ::testing;

constexpr std::uint32_t q8_0 = 8;
constexpr std::uint32_t q4_k = 12;

MetadataValue text_value(const char* text) { return {.value = text}; }

ConvertOptions gguf_options() {
  ConvertOptions options;
  options.format = FileFormat::gguf;
  options.metadata = {{"general.architecture", text_value("test")}};
  return options;
}

// Writes one metadata value of each type, including arrays.
GgufWriter typed_entries() {
  GgufWriter writer;
  writer.entry_text("general.architecture", "wan")
      .entry_number<std::uint8_t>("a.u8", GgufWriter::u8, 255)
      .entry_number<std::int8_t>("a.i8", GgufWriter::i8, -128)
      .entry_number<std::uint16_t>("a.u16", GgufWriter::u16, 65535)
      .entry_number<std::int16_t>("a.i16", GgufWriter::i16, -32768)
      .entry_number<std::uint32_t>("a.u32", GgufWriter::u32, 4294967295)
      .entry_number<std::int32_t>("a.i32", GgufWriter::i32, -7)
      .entry_number<float>("a.f32", GgufWriter::f32, 1e-6f)
      .entry_number<float>("a.f32_nan", GgufWriter::f32, std::numeric_limits<float>::quiet_NaN())
      .entry_number<float>("a.f32_inf", GgufWriter::f32, -std::numeric_limits<float>::infinity())
      .entry_number<std::uint64_t>("a.u64", GgufWriter::u64, UINT64_MAX)
      .entry_number<std::int64_t>("a.i64", GgufWriter::i64, INT64_MIN)
      .entry_number<double>("a.f64", GgufWriter::f64, 0.1)
      .entry("a.flag", GgufWriter::boolean, std::string(1, '\1'))
      .entry(
          "a.bools", GgufWriter::array,
          raw<std::uint32_t>(GgufWriter::boolean) + raw<std::uint64_t>(2) + std::string("\0\1", 2))
      .entry("a.floats", GgufWriter::array,
             raw<std::uint32_t>(GgufWriter::f32) + raw<std::uint64_t>(1) + raw<float>(0.5f))
      .entry("a.none", GgufWriter::array,
             raw<std::uint32_t>(GgufWriter::string) + raw<std::uint64_t>(0))
      .entry("a.nested", GgufWriter::array,
             raw<std::uint32_t>(GgufWriter::array) + raw<std::uint64_t>(1) +
                 raw<std::uint32_t>(GgufWriter::u8) + raw<std::uint64_t>(2) + "ab")
      .entry("a.tokens", GgufWriter::array,
             raw<std::uint32_t>(GgufWriter::string) + raw<std::uint64_t>(2) +
                 GgufWriter::text("<s>") + GgufWriter::text(""));
  return writer;
}

// Returns a file with blocks, values whose size is not a multiple of the alignment, and a scalar.
std::string block_file() {
  return typed_entries()
      .tensor("blocks.0.weight", {256, 300}, q4_k, some_blocks(300, 144, 2, 1))
      .tensor("blocks.1.weight", {64, 30}, q8_0, some_blocks(30 * 2, 34, 1, 2))
      .tensor("norm", {3}, 0, some_bytes(12, 3))
      .tensor("ids", {5}, 24, some_bytes(5, 4))
      .tensor("wide", {3}, 28, some_bytes(24, 5))
      .tensor("last", {7}, 30, some_bytes(14, 6))
      .bytes();
}

std::string value_in(const std::string& path, const std::string& name) {
  const auto catalog = open_checkpoint(path);
  const TensorInfo& tensor = catalog->tensors().at(catalog->find(name).value());
  return read_file(path).substr(tensor.offset_begin, tensor.byte_count());
}

void expect_same_metadata(const Metadata& found, const Metadata& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [key, item] : expected) {
    ASSERT_TRUE(found.contains(key)) << key;
    EXPECT_EQ(type_name(found.at(key)), type_name(item)) << key;
  }
}

TEST(ConvertGguf, AFileBecomesTheSameFile) {
  const TemporaryFolder folder;
  const std::string source = folder.write("source.gguf", block_file());
  ConvertOptions options;
  options.format = FileFormat::gguf;
  const ConvertReport report = converted(source, folder / "out.gguf", options);
  const auto before = open_checkpoint(source);
  const auto after = open_checkpoint(folder / "out.gguf");
  EXPECT_EQ(report.bytes_written, read_file(folder / "out.gguf").size());
  EXPECT_EQ(report.bytes_written % 32, 0u);
  ASSERT_EQ(after->tensors().size(), before->tensors().size());
  for (std::size_t i = 0; i < before->tensors().size(); ++i) {
    const TensorInfo& tensor = after->tensors()[i];
    EXPECT_EQ(tensor.name, before->tensors()[i].name);
    EXPECT_EQ(tensor.encoding, before->tensors()[i].encoding) << tensor.name;
    EXPECT_EQ(tensor.shape, before->tensors()[i].shape) << tensor.name;
    EXPECT_TRUE(value_in(folder / "out.gguf", tensor.name) == value_in(source, tensor.name));
  }
  expect_same_metadata(after->metadata(), before->metadata());
  EXPECT_THAT(after->findings(), SizeIs(before->findings().size()));
  EXPECT_TRUE(compare(*before, *after).ok());
  // The keys are already sorted, so a second conversion changes nothing.
  converted(folder / "out.gguf", folder / "again.gguf", options);
  EXPECT_TRUE(read_file(folder / "again.gguf") == read_file(folder / "out.gguf"));
}

TEST(ConvertGguf, ThreadsMemoryAndALargeAlignmentChangeNoByte) {
  const TemporaryFolder folder;
  const std::string source = folder.write("source.gguf", block_file());
  ConvertOptions options;
  options.format = FileFormat::gguf;
  options.metadata = {
      {"general.alignment", {.value = std::uint64_t{4096}, .type = MetadataType::u32}}};
  converted(source, folder / "out.gguf", options);
  const std::string expected = read_file(folder / "out.gguf");
  const auto catalog = open_checkpoint(folder / "out.gguf");
  for (const TensorInfo& tensor : catalog->tensors()) {
    EXPECT_EQ((tensor.offset_begin - catalog->shards()[0].data_begin) % 4096, 0u);
  }
  EXPECT_EQ(catalog->shards()[0].data_begin % 4096, 0u);
  for (const unsigned threads : {1u, 3u}) {
    for (const std::uint64_t staging : {1u, 4096u, 8'000'000u}) {
      options.threads = threads;
      options.staging_bytes_max = staging;
      converted(source, folder / "out.gguf", options);
      EXPECT_TRUE(read_file(folder / "out.gguf") == expected) << threads << " " << staging;
    }
  }
}

TEST(ConvertGguf, NumbersOfSafetensorsAreTheSameBytes) {
  const TemporaryFolder folder;
  const std::string source = folder.write(
      "source.safetensors", safetensors_bytes({{"b", "BF16", {2, 3}, some_bytes(12, 1)},
                                               {"h", "F16", {3}, some_bytes(6, 2)},
                                               {"f", "F32", {1, 1, 1, 2}, some_bytes(8, 3)},
                                               {"d", "F64", {1}, some_bytes(8, 4)},
                                               {"i8", "I8", {3}, some_bytes(3, 5)},
                                               {"i16", "I16", {3}, some_bytes(6, 6)},
                                               {"i32", "I32", {3}, some_bytes(12, 7)},
                                               {"i64", "I64", {3}, some_bytes(24, 8)},
                                               {"none", "F32", {0, 4}, ""},
                                               {"one", "F32", {}, some_bytes(4, 9)}},
                                              {{"format", "pt"}, {"note", "kept"}}));
  converted(source, folder / "out.gguf", gguf_options());
  const auto after = open_checkpoint(folder / "out.gguf");
  EXPECT_TRUE(compare(*open_checkpoint(source), *after).ok());
  EXPECT_EQ(std::get<std::string>(after->metadata().at("note").value), "kept");
  EXPECT_FALSE(after->metadata().contains("format"));
  EXPECT_EQ(after->tensors()[*after->find("b")].shape, (Shape{2, 3}));
}

std::vector<std::string> codes_of(const Conversion& conversion) {
  std::vector<std::string> codes;
  for (const Finding& finding : conversion.plan.findings) {
    if (finding.severity == Severity::error) codes.push_back(finding.code + " " + finding.target);
  }
  return codes;
}

TEST(ConvertGguf, WhatGgufDoesNotHaveIsRefusedByName) {
  const TemporaryFolder folder;
  const std::string long_name(64, 'n');
  const auto catalog = open_checkpoint(folder.write(
      "source.safetensors", safetensors_bytes({{"mask", "BOOL", {3}, std::string("\0\1\0", 3)},
                                               {"u8", "U8", {3}, some_bytes(3, 1)},
                                               {"fp8", "F8_E4M3", {4}, some_bytes(4, 2)},
                                               {"video", "F32", {1, 1, 1, 1, 2}, some_bytes(8, 3)},
                                               {long_name, "F32", {1}, some_bytes(4, 4)}})));
  const Conversion refused = make_conversion(catalog, gguf_options());
  EXPECT_THAT(codes_of(refused), ElementsAre("convert.dims video", "convert.name " + long_name,
                                             "plan.dtype fp8", "plan.dtype mask", "plan.dtype u8"));
  EXPECT_NE(code_of([&] { convert(refused, folder / "out.gguf"); }), "");
  EXPECT_THAT(names_in(folder.path()), ElementsAre("source.safetensors"));
  ConvertOptions options = gguf_options();
  options.beyond_ggml = true;
  EXPECT_THAT(codes_of(make_conversion(catalog, options)),
              ElementsAre("plan.dtype fp8", "plan.dtype mask", "plan.dtype u8"));
}

TEST(ConvertGguf, FiveDimsAndLongNamesOnRequest) {
  const TemporaryFolder folder;
  const std::string long_name(200, 'n');
  const std::string source = folder.write(
      "source.safetensors", safetensors_bytes({{"video", "F32", {2, 1, 3, 1, 2}, some_bytes(48, 3)},
                                               {long_name, "F32", {1}, some_bytes(4, 4)}}));
  ConvertOptions options = gguf_options();
  options.beyond_ggml = true;
  converted(source, folder / "out.gguf", options);
  const auto after = open_checkpoint(folder / "out.gguf");
  EXPECT_TRUE(compare(*open_checkpoint(source), *after).ok());
  EXPECT_EQ(std::get<std::uint64_t>(after->metadata().at(gguf_rank_key).value), 5u);
  options.format = FileFormat::safetensors;
  converted(folder / "out.gguf", folder / "b.safetensors", options);
  EXPECT_FALSE(open_checkpoint(folder / "b.safetensors")->metadata().contains(gguf_rank_key));
  options.format = FileFormat::gguf;
  options.metadata.emplace(gguf_rank_key, text_value("5"));
  EXPECT_EQ(code_of([&] { converted(source, folder / "c.gguf", options); }), "plan.options");
}

TEST(ConvertGguf, AnArchitectureIsNeeded) {
  const TemporaryFolder folder;
  const auto catalog = open_checkpoint(
      folder.write("source.safetensors", safetensors_bytes({{"a", "F32", {1}, some_bytes(4, 1)}})));
  ConvertOptions options;
  options.format = FileFormat::gguf;
  const Conversion refused = make_conversion(catalog, options);
  ASSERT_THAT(codes_of(refused), ElementsAre("convert.architecture "));
  EXPECT_THAT(refused.plan.findings[0].suggestion, HasSubstr("--arch NAME"));
  options.format = FileFormat::torch;
  EXPECT_EQ(code_of([&] { (void)make_conversion(catalog, options); }), "plan.options");
}

TEST(ConvertGguf, GivenKeysAreAddedAndReplace) {
  const TemporaryFolder folder;
  const std::string source = folder.write("source.gguf", block_file());
  ConvertOptions options = gguf_options();
  options.metadata.insert_or_assign("a.tokens", text_value("other"));
  options.metadata.emplace("new", MetadataValue{.value = 2.5, .type = MetadataType::f32});
  converted(source, folder / "out.gguf", options);
  const auto written = open_checkpoint(folder / "out.gguf");
  const Metadata& after = written->metadata();
  EXPECT_EQ(std::get<std::string>(after.at("general.architecture").value), "test");
  EXPECT_EQ(std::get<std::string>(after.at("a.tokens").value), "other");
  EXPECT_EQ(std::get<double>(after.at("new").value), 2.5);
  // safetensors metadata consists of strings, so arrays cannot be written.
  options.format = FileFormat::safetensors;
  converted(source, folder / "out.safetensors", options);
  const auto other = open_checkpoint(folder / "out.safetensors");
  const Metadata& texts = other->metadata();
  EXPECT_EQ(std::get<std::string>(texts.at("new").value), "2.5");
  options.metadata.emplace(
      "list", MetadataValue{.value = MetadataArray(MetadataType::u8), .type = MetadataType::array});
  EXPECT_EQ(code_of([&] { (void)make_conversion(open_checkpoint(source), options); }),
            "plan.options");
}

// The caller of the C++ API passes invalid metadata values.
TEST(ConvertGguf, ValuesThatAreNoneOfTheirTypeAreRefused) {
  const TemporaryFolder folder;
  const auto catalog = open_checkpoint(folder.write("source.gguf", block_file()));
  MetadataArray deep(MetadataType::array);
  MetadataArray deeper(MetadataType::array);
  deeper.add_array(MetadataArray(MetadataType::array));
  deep.add_array(std::move(deeper));
  const std::vector<std::pair<std::string, MetadataValue>> wrong = {
      {"a", {.value = std::uint64_t{256}, .type = MetadataType::u8}},
      {"a", {.value = std::int64_t{1}, .type = MetadataType::u8}},
      {"a", {.value = 1.0, .type = MetadataType::string}},
      {"a", {.value = 1e300, .type = MetadataType::f32}},
      {"a", {.value = "text", .type = MetadataType::array}},
      {"a", {.value = deep, .type = MetadataType::array}},
      {"two words", text_value("x")},
      {"", text_value("x")},
      {std::string(70000, 'k'), text_value("x")},
      {"general.alignment", {.value = std::uint64_t{24}, .type = MetadataType::u32}},
      {"general.alignment", {.value = std::uint64_t{32}, .type = MetadataType::u64}}};
  for (const auto& [key, item] : wrong) {
    ConvertOptions options;
    options.format = FileFormat::gguf;
    options.metadata = {{key, item}};
    EXPECT_EQ(code_of([&] { (void)make_conversion(catalog, options); }), "plan.options")
        << key.substr(0, 20) << " " << type_name(item);
  }
}

// loadstone copies blocks if the rules keep them whole. Other rules or a requested dtype decode.
TEST(ConvertGguf, BlocksStayWhereRowsStayWhole) {
  const TemporaryFolder folder;
  const std::string source = folder.write("source.gguf", block_file());
  const std::string out = folder / "out.gguf";
  const auto encoding_after = [&](const char* rules, const char* name,
                                  std::optional<Dtype> dtype = {}) {
    ConvertOptions options = gguf_options();
    options.rules = rules_from_json(rules);
    options.dtype = dtype;
    options.quantize.allow_non_finite = true;  // random blocks
    converted(source, out, options);
    const auto after = open_checkpoint(out);
    return after->tensors().at(after->find(name).value()).encoding;
  };
  constexpr const char* both = R"("sources": ["blocks\\.0\\.weight"])";
  const auto rule = [&](const std::string& head, const char* target = "new") {
    return "[{" + head + ", " + both + R"(, "targets": [")" + target + "\"]}]";
  };
  const std::string blocks = value_in(source, "blocks.0.weight");
  const Encoding kept = BlockFormat::q4_k;
  EXPECT_EQ(encoding_after(rule(R"("op": "rename")").c_str(), "new"), kept);
  EXPECT_TRUE(value_in(out, "new") == blocks);
  EXPECT_EQ(
      encoding_after(rule(R"("op": "slice", "dim": 0, "start": 7, "sizes": [11])").c_str(), "new"),
      kept);
  EXPECT_TRUE(value_in(out, "new") == blocks.substr(7 * 144, 11 * 144));
  EXPECT_EQ(encoding_after(rule(R"("op": "reshape", "sizes": [3, 100, 256])").c_str(), "new"),
            kept);
  EXPECT_TRUE(value_in(out, "new") == blocks);
  EXPECT_EQ(open_checkpoint(out)->tensors()[0].shape, (Shape{3, 100, 256}));
  EXPECT_EQ(encoding_after(rule(R"("op": "transpose", "dims": [0, 1])").c_str(), "new"),
            Encoding(Dtype::bf16));
  EXPECT_EQ(encoding_after(rule(R"("op": "reshape", "sizes": [600, 128])").c_str(), "new"),
            Encoding(Dtype::bf16));
  EXPECT_EQ(encoding_after(rule(R"("op": "rename")").c_str(), "new", Dtype::f16),
            Encoding(Dtype::f16));
  EXPECT_EQ(encoding_after(R"([{"op": "stack", "dim": 0, "sources": ["blocks\\.0\\.weight"],
                               "targets": ["new"]}])",
                           "new"),
            kept);
}

// The rules permute rows, so whole blocks move.
TEST(ConvertGguf, StacksOfBlocksAndTheirRowsInAnotherOrder) {
  const TemporaryFolder folder;
  const std::string first = some_bytes(6 * 144, 1);
  const std::string second = some_bytes(6 * 144, 2);
  const std::string source =
      folder.write("source.gguf", GgufWriter()
                                      .entry_text("general.architecture", "x")
                                      .tensor("e.0", {256, 6}, q4_k, first)
                                      .tensor("e.1", {256, 6}, q4_k, second)
                                      .bytes());
  ConvertOptions options;
  options.format = FileFormat::gguf;
  options.rules = rules_from_json(
      R"x([{"op": "stack", "dim": 1, "sources": ["e\\.(\\d+)"], "targets": ["all"]}])x");
  converted(source, folder / "out.gguf", options);
  const auto after = open_checkpoint(folder / "out.gguf");
  EXPECT_EQ(after->tensors()[0].encoding, Encoding(BlockFormat::q4_k));
  EXPECT_EQ(after->tensors()[0].shape, (Shape{6, 2, 256}));
  std::string expected;
  for (std::size_t row = 0; row < 6; ++row) {
    expected += first.substr(row * 144, 144) + second.substr(row * 144, 144);
  }
  EXPECT_TRUE(value_in(folder / "out.gguf", "all") == expected);
}

ConvertOptions split_options(std::uint64_t bytes_max) {
  ConvertOptions options;
  options.format = FileFormat::gguf;
  options.one_file = false;
  options.is_split = true;
  options.stem = "out";
  options.shard_bytes_max = bytes_max;
  return options;
}

TEST(ConvertGguf, SplitFilesAreLlamaCpps) {
  const TemporaryFolder folder;
  const std::string source = folder.write("source.gguf", block_file());
  folder.write("other.gguf", block_file());
  folder.write("sub/file", "x");
  const ConvertReport report = converted(source, folder / "out.gguf", split_options(42'000));
  EXPECT_THAT(report.outputs,
              ElementsAre(folder / "out-00001-of-00002.gguf", folder / "out-00002-of-00002.gguf"));
  EXPECT_THAT(names_in(folder.path()),
              ElementsAre(".loadstone-out.gguf.done", "other.gguf", "out-00001-of-00002.gguf",
                          "out-00002-of-00002.gguf", "source.gguf", "sub", "sub/file"));
  const auto split = open_checkpoint(folder / "out-00002-of-00002.gguf");
  EXPECT_EQ(split->shards().size(), 2u);
  EXPECT_TRUE(compare(*open_checkpoint(source), *split).ok());
  EXPECT_EQ(std::get<std::string>(split->metadata().at("general.architecture").value), "wan");
  EXPECT_EQ(split->metadata().at("split.count").type, MetadataType::u16);
  EXPECT_EQ(split->metadata().at("split.tensors.count").type, MetadataType::i32);
  // Converting back to one file drops the keys about split files.
  ConvertOptions whole;
  whole.format = FileFormat::gguf;
  const TemporaryFolder elsewhere;
  converted(folder / "out-00001-of-00002.gguf", elsewhere / "back.gguf", whole);
  EXPECT_FALSE(open_checkpoint(elsewhere / "back.gguf")->metadata().contains("split.count"));
  converted(source, elsewhere / "straight.gguf", whole);
  EXPECT_TRUE(read_file(elsewhere / "back.gguf") == read_file(elsewhere / "straight.gguf"));
}

TEST(ConvertGguf, SplitFilesReplaceOnlyAnEarlierOutputAndOneIsEnough) {
  const TemporaryFolder folder;
  const std::string source = folder.write("source.gguf", block_file());
  converted(source, folder / "out.gguf", split_options(42'000));
  const std::string first = read_file(folder / "out-00001-of-00002.gguf");
  converted(source, folder / "out.gguf", split_options(42'000));
  EXPECT_EQ(names_in(folder.path()).size(), 1u + 3u);  // with a record
  std::filesystem::remove(folder / ".loadstone-out.gguf.done");
  EXPECT_EQ(code_of([&] { converted(source, folder / "out.gguf", split_options(1)); }),
            "convert.target");
  EXPECT_TRUE(read_file(folder / "out-00001-of-00002.gguf") == first);
  ConvertOptions large = split_options(1 << 30);
  large.stem = "small";
  const ConvertReport report = converted(source, folder / "small.gguf", large);
  EXPECT_THAT(report.outputs, ElementsAre(folder / "small.gguf"));
  EXPECT_EQ(names_in(folder.path()).size(), 2u + 3u);  // with one record
  ConvertOptions wrong = split_options(1);
  wrong.format = FileFormat::safetensors;
  EXPECT_EQ(code_of([&] { (void)make_conversion(open_checkpoint(source), wrong); }),
            "plan.options");
}

// The conversion takes three runs: two parts, and a last run that gives the files their final
// names.
TEST(ConvertGguf, SplitFilesInParts) {
  const TemporaryFolder folder;
  const std::string source = folder.write("source.gguf", block_file());
  const Conversion conversion = make_conversion(open_checkpoint(source), split_options(2000));
  ASSERT_GE(conversion.files.size(), 2u);
  const std::string target = folder / "out.gguf";
  convert(conversion, target, {.part = ConvertPart{1, 2}});
  EXPECT_EQ(code_of([&] { convert(conversion, target, {.finish = true}); }), "convert.incomplete");
  convert(conversion, target, {.part = ConvertPart{2, 2}});
  convert(conversion, target, {.finish = true});
  const std::string any = folder / conversion.files.front().name;
  EXPECT_TRUE(compare(*open_checkpoint(source), *open_checkpoint(any)).ok());
  // The source, the files, and the record of the finished job.
  EXPECT_EQ(names_in(folder.path()).size(), 2 + conversion.files.size());
}

TEST(ConvertGguf, TargetsSayTheirFormat) {
  EXPECT_EQ(format_of_target("a/b.gguf"), FileFormat::gguf);
  EXPECT_EQ(format_of_target("b.safetensors"), FileFormat::safetensors);
  EXPECT_EQ(format_of_target("folder"), std::nullopt);
  EXPECT_EQ(format_of_target("b.gguf/"), std::nullopt);
  for (const char* name : {"b.GGUF", "b.pt", "b.Safetensors", "b.bin"}) {
    EXPECT_EQ(code_of([&] { (void)format_of_target(name); }), "convert.target") << name;
  }
}

}  // namespace

}  // namespace loadstone::test
