#include "loadstone/convert.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>

#include "codec/decode.h"
#include "loadstone/error.h"
#include "loadstone/execute.h"
#include "loadstone/recipe_builder.h"
#include "loadstone/verify.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/samples.h"

namespace loadstone::test {

namespace {

namespace fs = std::filesystem;
using namespace ::testing;

TEST(Convert, ShardsAndBackGiveTheSameBytes) {
  const TemporaryFolder folder;
  const std::string source = folder.write("source.safetensors", mixed_file());
  const ConvertReport one = converted(source, folder / "one.safetensors");
  EXPECT_THAT(one.outputs, ElementsAre(folder / "one.safetensors"));
  EXPECT_EQ(one.bytes_written, fs::file_size(folder / "one.safetensors"));
  const ConvertReport many =
      converted(source, folder / "many/", {.one_file = false, .shard_bytes_max = 150000});
  EXPECT_THAT(many.outputs, SizeIs(4));
  EXPECT_THAT(many.outputs.back(), HasSubstr("many/model.safetensors.index.json"));
  const auto shards = open_checkpoint(folder / "many");
  EXPECT_EQ(shards->shards().size(), 3u);
  EXPECT_THAT(shards->findings(), IsEmpty());  // total_size, numbering
  const auto first = open_checkpoint(source);
  EXPECT_TRUE(compare(*first, *shards).ok());
  EXPECT_TRUE(compare(*first, *open_checkpoint(folder / "one.safetensors")).ok());
  converted(folder / "many", folder / "back.safetensors");
  EXPECT_TRUE(read_file(folder / "back.safetensors") == read_file(folder / "one.safetensors"));
  EXPECT_THAT(names_in(folder.path()), SizeIs(3 + 3 + 1 + 4));  // and three records
}

// Control for the previous test: compare() detects one changed byte.
TEST(Convert, AnotherByteIsSeen) {
  const TemporaryFolder folder;
  const std::string source = folder.write("source.safetensors", mixed_file());
  converted(source, folder / "one.safetensors");
  std::string bytes = read_file(folder / "one.safetensors");
  bytes[bytes.size() - 100] = static_cast<char>(bytes[bytes.size() - 100] ^ 1);
  folder.write("one.safetensors", bytes);
  EXPECT_FALSE(
      compare(*open_checkpoint(source), *open_checkpoint(folder / "one.safetensors")).ok());
}

TEST(Convert, WideElementsComeFirstAndStandAligned) {
  const TemporaryFolder folder;
  converted(folder.write("source.safetensors", mixed_file()), folder / "one.safetensors");
  const auto catalog = open_checkpoint(folder / "one.safetensors");
  EXPECT_EQ(catalog->shards()[0].data_begin % 8, 0u);
  for (const TensorInfo& tensor : catalog->tensors()) {
    const std::uint64_t width = std::max(bits(tensor.encoding.dtype()) / 8, 1u);
    EXPECT_EQ(tensor.offset_begin % width, 0u) << tensor.name;
  }
  EXPECT_EQ(std::get<std::string>(catalog->metadata().at("note").value), "a \"quoted\" note");
}

// Returns a GGUF file with a Q8_0 tensor, a transposed tensor and a scalar key.
std::string gguf_file() {
  GgufWriter writer;
  writer.entry_text("general.architecture", "wan")
      .entry_number<std::uint32_t>("wan.block_count", GgufWriter::u32, 7)
      .entry_number<float>("wan.epsilon", GgufWriter::f32, 1e-6f)
      .entry("wan.flag", GgufWriter::boolean, std::string(1, '\1'))
      .entry("tokens", GgufWriter::array,
             raw<std::uint32_t>(GgufWriter::u8) + raw<std::uint64_t>(2) + "ab")
      .tensor("blocks.weight", {256, 300}, 8, some_blocks(256 * 300 / 32, 34, 1, 1))
      .tensor("blocks.norm", {256}, 0, some_bytes(1024, 2));
  return writer.bytes();
}

// Returns the decoded values of a tensor that is stored in blocks.
std::vector<std::byte> decoded(const Catalog& catalog, const std::string& file,
                               const std::string& name, Dtype dtype) {
  const TensorInfo& tensor = catalog.tensors()[*catalog.find(name)];
  const DecodePart part = {tensor.encoding, tensor.shape};
  PreparedDecoder form;
  EXPECT_FALSE(prepare_decoding("gguf", {&part, 1}, tensor.shape, dtype, 0, form));
  std::vector<std::byte> value(form.elements * bits(dtype) / 8);
  const auto* blocks = reinterpret_cast<const std::byte*>(file.data() + tensor.offset_begin);
  decode(form, 0, form.elements, {&blocks, 1}, value.data());
  return value;
}

std::string value_in(const std::string& path, const std::string& name) {
  const auto catalog = open_checkpoint(path);
  const TensorInfo& tensor = catalog->tensors().at(catalog->find(name).value());
  return read_file(path).substr(tensor.offset_begin, tensor.byte_count());
}

bool holds(const std::string& value, const std::vector<std::byte>& expected) {
  return std::ranges::equal(std::as_bytes(std::span(value)), expected);
}

TEST(Convert, BlocksBecomeNumbersRoundedOnce) {
  const TemporaryFolder folder;
  const std::string file = gguf_file();
  const std::string source = folder.write("source.gguf", file);
  const auto catalog = open_checkpoint(source);
  const std::string target = folder / "out.safetensors";
  const auto dtype_of = [&](const char* name) {
    const auto made = open_checkpoint(target);
    return made->tensors().at(made->find(name).value()).encoding;
  };
  converted(source, target);
  EXPECT_TRUE(holds(value_in(target, "blocks.weight"),
                    decoded(*catalog, file, "blocks.weight", Dtype::bf16)));
  EXPECT_EQ(dtype_of("blocks.norm"), Encoding(Dtype::f32));
  converted(source, target, {.block_dtype = Dtype::f16, .quantize = {.allow_non_finite = true}});
  EXPECT_TRUE(holds(value_in(target, "blocks.weight"),
                    decoded(*catalog, file, "blocks.weight", Dtype::f16)));
  EXPECT_EQ(dtype_of("blocks.norm"), Encoding(Dtype::f32));
  converted(source, target, {.dtype = Dtype::f32});
  EXPECT_TRUE(holds(value_in(target, "blocks.weight"),
                    decoded(*catalog, file, "blocks.weight", Dtype::f32)));
  converted(source, target, {.dtype = Dtype::bf16});
  EXPECT_EQ(dtype_of("blocks.norm"), Encoding(Dtype::bf16));
}

TEST(Convert, MetadataIsCarriedOverAsText) {
  const TemporaryFolder folder;
  const auto catalog = open_checkpoint(folder.write("source.gguf", gguf_file()));
  const Conversion conversion = make_conversion(catalog);
  std::vector<std::pair<std::string, std::string>> texts;
  for (const auto& [key, item] : conversion.metadata) {
    texts.emplace_back(key, std::get<std::string>(item.value));
  }
  EXPECT_THAT(texts,
              ElementsAre(std::pair("format", "pt"), std::pair("general.architecture", "wan"),
                          std::pair("loadstone.gguf_types",
                                    "wan.block_count=u32 wan.epsilon=f32 wan.flag=bool"),
                          std::pair("wan.block_count", "7"), std::pair("wan.epsilon", "1e-06"),
                          std::pair("wan.flag", "true")));
  ASSERT_THAT(conversion.plan.findings, SizeIs(1));
  EXPECT_EQ(conversion.plan.findings[0].code, "convert.metadata");
  EXPECT_THAT(conversion.plan.findings[0].sources, ElementsAre("tokens"));
}

// loadstone must not cast 8-bit and smaller floats, because they have no meaning without their
// scales.
TEST(Convert, ADtypeIsForWideFloatsOnly) {
  const TemporaryFolder folder;
  const auto catalog = open_checkpoint(folder.write("source.safetensors", mixed_file()));
  const Conversion conversion = make_conversion(catalog, {.dtype = Dtype::f16});
  for (const PlannedTarget& target : conversion.plan.targets) {
    const Encoding before = catalog->tensors()[*catalog->find(target.name)].encoding;
    const bool is_wide = before == Encoding(Dtype::bf16) || before == Encoding(Dtype::f32) ||
                         before == Encoding(Dtype::f16);
    EXPECT_EQ(Encoding(target.dtype), is_wide ? Encoding(Dtype::f16) : before) << target.name;
  }
  EXPECT_EQ(code_of([&] { (void)make_conversion(catalog, {.dtype = Dtype::i32}); }),
            "plan.options");
  EXPECT_EQ(code_of([&] { (void)make_conversion(catalog, {.block_dtype = Dtype::f64}); }),
            "plan.options");
  const auto code = [&](bool one_file, const char* stem) {
    return code_of([&] { (void)make_conversion(catalog, {.one_file = one_file, .stem = stem}); });
  };
  EXPECT_EQ(code(false, "../up"), "plan.options");
  EXPECT_EQ(code(true, "up"), "plan.options");
  EXPECT_EQ(code(false, "up"), "");
}

Rules some_rules() {
  return rules_from_json(R"([
    {"op": "concat", "dim": 0, "sources": ["layers\\.(\\d+)\\.q", "layers\\.(\\d+)\\.k"],
     "targets": ["model.layers.$1.qk"]},
    {"op": "transpose", "dims": [0, 1], "sources": ["norm"], "targets": ["transposed"]},
    {"op": "split", "dim": 0, "sources": ["scale"], "targets": ["scale.a", "scale.b"]}])");
}

// A conversion with rules must write the tensors that a load with the same rules produces.
TEST(Convert, RulesMakeWhatALoadMakes) {
  const TemporaryFolder folder;
  const std::string source = folder.write("source.safetensors", mixed_file());
  const std::string target = folder / "out.safetensors";
  converted(source, target, {.rules = some_rules()});
  const auto made = open_checkpoint(target);
  EXPECT_EQ(made->tensors().size(), 11u - 4 + 2 + 1);
  const Skeleton skeleton = Skeleton::from_catalog(*made);
  PlanOptions options;
  options.rules = some_rules();
  const Plan plan = make_plan(open_checkpoint(source), skeleton, options);
  require_ok(plan);
  const HostMemory memory(plan);
  execute(plan, memory.destinations());
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    const Destination& value = memory.destinations()[i];
    EXPECT_TRUE(
        holds(value_in(target, plan.targets[i].name), {value.data, value.data + value.byte_count}))
        << plan.targets[i].name;
  }
  EXPECT_EQ(made->tensors()[*made->find("transposed")].shape, (Shape{301, 300}));
}

TEST(Convert, MemoryAndThreadsChangeNoByte) {
  const TemporaryFolder folder;
  const std::string source = folder.write("source.safetensors", mixed_file());
  converted(source, folder / "wide.safetensors", {.rules = some_rules(), .threads = 4});
  const std::string expected = read_file(folder / "wide.safetensors");
  for (const unsigned threads : {1u, 3u}) {
    for (const std::uint64_t staging : {1u, 4096u, 200'000u, 8'000'000u}) {
      const ConvertReport report =
          converted(source, folder / "out.safetensors",
                    {.rules = some_rules(), .staging_bytes_max = staging, .threads = threads});
      EXPECT_TRUE(read_file(folder / "out.safetensors") == expected);
      EXPECT_GE(report.bytes_read, 540'000u);
      // A small staging budget makes the reader read transposed data again.
      EXPECT_EQ(report.bytes_read > 600'000u, staging < 1'000'000u) << report.bytes_read;
    }
  }
}

TEST(Convert, ABudgetIsKeptOrRefusedWithTheLeastThatWouldDo) {
  const TemporaryFolder folder;
  const std::string source = folder.write("source.safetensors", mixed_file());
  const auto catalog = open_checkpoint(source);
  const Conversion refused = make_conversion(catalog, {.memory_bytes_max = 1000});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.plan.findings[0].code, "plan.over_budget");
  EXPECT_EQ(code_of([&] { convert(refused, folder / "out.safetensors"); }), "plan.over_budget");
  const std::uint64_t least = std::stoull(refused.plan.findings[0].expected);
  EXPECT_FALSE(make_conversion(catalog, {.memory_bytes_max = least - 1}).ok());
  const Conversion small = make_conversion(catalog, {.memory_bytes_max = least});
  ASSERT_TRUE(small.ok());
  EXPECT_LE(small.peak_bytes, least);
  EXPECT_EQ(small.budget.threads, 1u);
  convert(small, folder / "small.safetensors");
  converted(source, folder / "out.safetensors");
  EXPECT_TRUE(read_file(folder / "small.safetensors") == read_file(folder / "out.safetensors"));
  for (const std::uint64_t budget : {4u << 20, 9u << 20, 40u << 20}) {
    EXPECT_LE(make_conversion(catalog, {.memory_bytes_max = budget, .threads = 16}).peak_bytes,
              budget);
  }
}

TEST(Convert, WhatRulesCannotMakeIsFoundBeforeAnythingIsWritten) {
  const TemporaryFolder folder;
  const auto catalog = open_checkpoint(folder.write("source.safetensors", mixed_file()));
  const auto first = [&](const char* rules) {
    const Conversion conversion = make_conversion(catalog, {.rules = rules_from_json(rules)});
    EXPECT_FALSE(conversion.ok());
    EXPECT_NE(code_of([&] { convert(conversion, folder / "out.safetensors"); }), "");
    return conversion.plan.findings.empty() ? "" : conversion.plan.findings[0].code;
  };
  EXPECT_EQ(first(R"([{"op": "rename", "sources": ["layers.*"], "targets": ["same"]}])"),
            "plan.duplicate");
  EXPECT_EQ(first(R"([{"op": "reshape", "sizes": [7], "sources": ["norm"], "targets": ["n"]}])"),
            "plan.shape");
  EXPECT_EQ(first(R"([{"op": "stack", "dim": 0, "sources": ["ids", "norm"], "targets": ["n"]}])"),
            "plan.shape");
  EXPECT_EQ(first(R"([{"op": "concat", "dim": 0, "sources": ["mask", "ids"], "targets": ["n"]}])"),
            "plan.dtype");
  EXPECT_EQ(first(R"([{"op": "concat", "dim": 0, "sources": ["layers\\.0\\.q", "gone"],
                       "targets": ["n"]}])"),
            "plan.missing");
  EXPECT_EQ(first(R"([{"op": "rename", "sources": ["ids"], "targets": ["__metadata__"]}])"),
            "convert.name");
  EXPECT_THAT(names_in(folder.path()), ElementsAre("source.safetensors"));
}

TEST(Convert, RecipesAloneDecideWhatThereIs) {
  const TemporaryFolder folder;
  const std::string file = gguf_file();
  const std::string source = folder.write("source.gguf", file);
  const auto catalog = open_checkpoint(source);
  RecipeBuilder builder(catalog);
  const auto weight =
      builder.decode("gguf", {builder.source("blocks.weight")}, {300, 256}, Dtype::f32);
  builder.add("top", builder.cast(builder.slice(weight, 0, 0, 150), Dtype::bf16));
  builder.add("bottom", builder.cast(builder.slice(weight, 0, 150, 150), Dtype::bf16));
  const std::string table = some_bytes(12, 5);
  builder.add("table", builder.constant(std::as_bytes(std::span(table)), {3}, Dtype::f32));
  const Recipes recipes = builder.finish();
  const std::string target = folder / "out.safetensors";
  const Conversion conversion = make_conversion(catalog, {.recipes = recipes});
  ASSERT_TRUE(conversion.ok());
  std::vector<std::string> codes;
  for (const Finding& finding : conversion.plan.findings) codes.push_back(finding.code);
  EXPECT_THAT(codes, UnorderedElementsAre("plan.unexpected",  // blocks.norm
                                          "convert.metadata"));
  convert(conversion, target);
  EXPECT_TRUE(holds(value_in(target, "top") + value_in(target, "bottom"),
                    decoded(*catalog, file, "blocks.weight", Dtype::bf16)));
  EXPECT_EQ(value_in(target, "table"), table);
  EXPECT_EQ(open_checkpoint(target)->tensors().size(), 3u);
  EXPECT_FALSE(
      make_conversion(catalog, {.recipes = recipes, .unexpected = UnexpectedPolicy::error}).ok());
  converted(source, target, {.recipes = recipes, .dtype = Dtype::f64});
  EXPECT_EQ(value_in(target, "table").size(), 24u);
  EXPECT_EQ(value_in(target, "top").size(), 150u * 256 * 8);
  // The rules must not drop the tensors that the recipes do not use.
  const Rules rules = {{.sources = {"blocks\\.norm"}, .targets = {"norm"}}};
  EXPECT_EQ(make_conversion(catalog, {.rules = rules, .recipes = recipes}).plan.targets.size(), 4u);
}

TEST(Convert, NoTensorsAndNoElements) {
  const TemporaryFolder folder;
  converted(folder.write("none.safetensors", safetensors_bytes({})), folder / "a.safetensors");
  EXPECT_EQ(open_checkpoint(folder / "a.safetensors")->tensors().size(), 0u);
  converted(folder.write("empty.safetensors", safetensors_bytes({{"e", "F32", {2, 0}, ""}})),
            folder / "b.safetensors", {.dtype = Dtype::bf16});
  EXPECT_EQ(open_checkpoint(folder / "b.safetensors")->tensors()[0].shape, (Shape{2, 0}));
}

TEST(ConvertText, SaysWhatHappensWithoutControlCharacters) {
  const TemporaryFolder folder;
  const std::string source = folder.write(
      "source.safetensors", safetensors_bytes({{"a\x1b[2J", "F32", {2}, some_bytes(8)}}));
  const Conversion conversion = make_conversion(
      open_checkpoint(source), {.dtype = Dtype::f16, .quantize = {.allow_non_finite = true}});
  const std::string table = to_table(conversion, true);
  EXPECT_THAT(table, AllOf(HasSubstr("F32 to F16"), HasSubstr("a\\x1b[2J")));
  EXPECT_EQ(table.find('\x1b'), std::string::npos);
  EXPECT_THAT(to_json(conversion), HasSubstr("\"made_of\""));
  const ConvertReport report = convert(conversion, folder / "out.safetensors");
  EXPECT_THAT(to_json(report), AllOf(HasSubstr("\"outputs\""), HasSubstr("\"peak_bytes\"")));
  EXPECT_EQ(open_checkpoint(folder / "out.safetensors")->tensors()[0].name, "a\x1b[2J");
}

}  // namespace

}  // namespace loadstone::test
