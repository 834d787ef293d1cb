#include "loadstone/convert.h"

#include <gmock/gmock.h>
#include <sys/mount.h>

#include <algorithm>
#include <atomic>
#include <filesystem>

#include "kernels/decode.h"
#include "loadstone/error.h"
#include "loadstone/execute.h"
#include "loadstone/recipe_builder.h"
#include "loadstone/verify.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/watched_storage.h"

namespace loadstone::test {

namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    names.push_back(entry.path().lexically_relative(folder).string());
  }
  std::ranges::sort(names);
  return names;
}

// One tensor of each kind, too large for the smallest windows.
std::string mixed_file() {
  return safetensors_bytes({{"layers.0.q", "BF16", {96, 256}, some_bytes(96 * 256 * 2, 1)},
                            {"layers.0.k", "BF16", {32, 256}, some_bytes(32 * 256 * 2, 2)},
                            {"layers.1.q", "BF16", {96, 256}, some_bytes(96 * 256 * 2, 3)},
                            {"layers.1.k", "BF16", {32, 256}, some_bytes(32 * 256 * 2, 4)},
                            {"norm", "F32", {300, 301}, some_bytes(300 * 301 * 4, 5)},
                            {"ids", "I64", {1001}, some_bytes(8008, 6)},
                            {"mask", "BOOL", {3}, std::string("\0\1\0", 3)},
                            {"scale", "F8_E4M3", {40000}, some_bytes(40000, 7)},
                            {"nibbles", "F4", {2, 6}, some_bytes(6, 8)},
                            {"empty", "F16", {0, 4}, ""},
                            {"one", "F32", {}, some_bytes(4, 9)}},
                           {{"format", "pt"}, {"note", "a \"quoted\" note"}});
}

ConvertReport converted(const std::string& source, const std::string& target,
                        const ConvertOptions& options = {}) {
  return convert(make_conversion(open_checkpoint(source), options), target);
}

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
  EXPECT_THAT(names_in(folder.path()), SizeIs(3 + 1 + 4));
}

// The control of the above: compare() sees one other byte.
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

// A Q8_0 tensor, one that is turned, and what ggml calls a scalar key.
std::string gguf_file() {
  GgufWriter writer;
  writer.entry_text("general.architecture", "wan")
      .entry_number<std::uint32_t>("wan.block_count", GgufWriter::u32, 7)
      .entry_number<float>("wan.epsilon", GgufWriter::f32, 1e-6f)
      .entry("wan.flag", GgufWriter::boolean, std::string(1, '\1'))
      .entry("tokens", GgufWriter::array,
             raw<std::uint32_t>(GgufWriter::u8) + raw<std::uint64_t>(2) + "ab")
      .tensor("blocks.weight", {256, 300}, 8, some_bytes(256 * 300 / 32 * 34, 1))
      .tensor("blocks.norm", {256}, 0, some_bytes(1024, 2));
  return writer.bytes();
}

// What the tensor's blocks stand for.
std::vector<std::byte> decoded(const Catalog& catalog, const std::string& file,
                               const std::string& name, Dtype dtype) {
  const TensorInfo& tensor = catalog.tensors()[*catalog.find(name)];
  const DecodePart part = {tensor.encoding, tensor.shape};
  DecodeForm form;
  EXPECT_FALSE(prepare_decoding("gguf", {&part, 1}, tensor.shape, dtype, form));
  std::vector<std::byte> value(form.elements * bits(dtype) / 8);
  const auto* blocks = reinterpret_cast<const std::byte*>(file.data() + tensor.offset_begin);
  decode(form, 0, form.elements, blocks, nullptr, value.data());
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
  converted(source, target, {.block_dtype = Dtype::f16});
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
  EXPECT_THAT(conversion.metadata,
              ElementsAre(std::pair("format", "pt"), std::pair("general.architecture", "wan"),
                          std::pair("wan.block_count", "7"), std::pair("wan.epsilon", "1e-06"),
                          std::pair("wan.flag", "true")));
  ASSERT_THAT(conversion.plan.findings, SizeIs(1));
  EXPECT_EQ(conversion.plan.findings[0].code, "convert.metadata");
  EXPECT_THAT(conversion.plan.findings[0].sources, ElementsAre("tokens"));
}

// Narrow floats without their scales are no numbers to be cast.
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
  EXPECT_EQ(code_of([&] { (void)make_conversion(catalog, {.stem = "../up"}); }), "plan.options");
}

Rules some_rules() {
  return rules_from_json(R"([
    {"op": "concat", "dim": 0, "sources": ["layers\\.(\\d+)\\.q", "layers\\.(\\d+)\\.k"],
     "targets": ["model.layers.$1.qk"]},
    {"op": "transpose", "dims": [0, 1], "sources": ["norm"], "targets": ["turned"]},
    {"op": "split", "dim": 0, "sources": ["scale"], "targets": ["scale.a", "scale.b"]}])");
}

// What rules make of a checkpoint is what a load with the same rules gives.
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
  EXPECT_EQ(made->tensors()[*made->find("turned")].shape, (Shape{301, 300}));
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
      // What is turned is read again where there is little room.
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
  EXPECT_EQ(small.threads, 1u);
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
  EXPECT_THAT(codes, ElementsAre("plan.unexpected", "convert.metadata"));  // blocks.norm
  convert(conversion, target);
  EXPECT_TRUE(holds(value_in(target, "top") + value_in(target, "bottom"),
                    decoded(*catalog, file, "blocks.weight", Dtype::bf16)));
  EXPECT_EQ(value_in(target, "table"), table);
  EXPECT_EQ(open_checkpoint(target)->tensors().size(), 3u);
  EXPECT_FALSE(
      make_conversion(catalog, {.recipes = recipes, .unexpected = UnexpectedPolicy::error}).ok());
  // With rules, too, what recipes leave over is there.
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

class Target : public ::testing::Test {
 protected:
  std::string code(const std::string& target, const std::string& from = {}) {
    const std::string start = from.empty() ? source : from;
    const ConvertOptions options = {.one_file = target.ends_with(".safetensors")};
    const auto conversion = make_conversion(open_checkpoint(start), options);
    return code_of([&] { convert(conversion, target); });
  }

  TemporaryFolder folder;
  std::string bytes = mixed_file();
  std::string source = folder.write("in/source.safetensors", bytes);
};

TEST_F(Target, TheSourceIsNeverWritten) {
  EXPECT_EQ(code(source), "convert.target");
  fs::create_hard_link(source, folder / "hard.safetensors");
  EXPECT_EQ(code(folder / "hard.safetensors"), "convert.target");
  fs::create_symlink(source, folder / "link.safetensors");
  EXPECT_EQ(code(folder / "link.safetensors"), "convert.target");
  EXPECT_EQ(code(folder / "in"), "convert.target");
  EXPECT_EQ(code((folder / "in") + "/../in/."), "convert.target");
  EXPECT_TRUE(read_file(source) == bytes);
  // A neighbour of a single file is something else.
  EXPECT_EQ(code(folder / "in/other.safetensors"), "");
}

TEST_F(Target, AFolderOfShardsStaysAsItIs) {
  converted(source, folder / "many", {.one_file = false, .shard_bytes_max = 150000});
  const auto before = names_in(folder / "many");
  EXPECT_EQ(code(folder / "many/out.safetensors", folder / "many"), "convert.target");
  EXPECT_EQ(code(folder / "many/deeper", folder / "many"), "convert.target");
  fs::create_symlink(folder / "many", folder / "alias");
  EXPECT_EQ(code(folder / "alias/out.safetensors", folder / "many"), "convert.target");
  EXPECT_EQ(names_in(folder / "many"), before);
}

TEST_F(Target, AFileIsReplacedWholeAndAFolderIsJoined) {
  folder.write("old.safetensors", "something else");
  EXPECT_EQ(code(folder / "old.safetensors"), "");
  EXPECT_EQ(open_checkpoint(folder / "old.safetensors")->tensors().size(), 11u);
  folder.write("joined/config.json", "{}");
  EXPECT_EQ(code(folder / "joined"), "");
  EXPECT_THAT(names_in(folder / "joined"), ElementsAre("config.json", "model.safetensors"));
  fs::create_directory(folder / "empty");
  EXPECT_EQ(code(folder / "empty"), "");
  EXPECT_THAT(names_in(folder / "empty"), ElementsAre("model.safetensors"));
  converted(source, folder / "named", {.one_file = false, .stem = "diffusion_pytorch_model"});
  EXPECT_THAT(names_in(folder / "named"), ElementsAre("diffusion_pytorch_model.safetensors"));
}

// The older output goes in the moment in which the new one is there; what is beside it stays.
TEST_F(Target, AnOlderOutputIsReplacedWhole) {
  converted(source, folder / "out", {.one_file = false, .shard_bytes_max = 150000});
  folder.write("out/config.json", "{}");
  folder.write("out/model.md", "text");
  fs::permissions(folder / "out", fs::perms::owner_all);
  FaultyStorage faulty(local_storage(),
                       {.path_end = "source.safetensors", .offset_begin = 300'000});
  const auto before = names_in(folder / "out");
  const Conversion conversion = make_conversion(open_checkpoint(source), {.one_file = false});
  EXPECT_EQ(code_of([&] { convert(conversion, folder / "out", nullptr, &faulty); }), "io.read");
  EXPECT_EQ(names_in(folder / "out"), before);
  EXPECT_EQ(code(folder / "out"), "");
  EXPECT_THAT(names_in(folder / "out"),
              ElementsAre("config.json", "model.md", "model.safetensors"));
  EXPECT_EQ(read_file(folder / "out/config.json"), "{}");
  EXPECT_EQ(fs::status(folder / "out").permissions(), fs::perms::owner_all);
  EXPECT_TRUE(compare(*open_checkpoint(source), *open_checkpoint(folder / "out")).ok());
  EXPECT_THAT(names_in(folder.path()), SizeIs(2 + 1 + 3));
}

TEST_F(Target, AModelOfSomebodyElseStays) {
  folder.write("out/other.safetensors", "x");
  EXPECT_EQ(code(folder / "out"), "convert.target");
  folder.write("deep/model.safetensors", "x");
  folder.write("deep/sub/file", "x");
  EXPECT_EQ(code(folder / "deep"), "convert.target");
  folder.write("plain/model.safetensors", "x");
  fs::create_symlink(folder / "plain", folder / "alias");
  EXPECT_EQ(code(folder / "alias"), "convert.target");
  EXPECT_EQ(read_file(folder / "plain/model.safetensors"), "x");
  fs::create_directory(folder / "empty");
  fs::create_symlink(folder / "empty", folder / "link");
  EXPECT_EQ(code(folder / "link"), "");
  EXPECT_THAT(names_in(folder / "empty"), ElementsAre("model.safetensors"));
}

TEST_F(Target, WhatIsNoFileAndNoFolderIsLeftAlone) {
  fs::create_directory(folder / "folder.safetensors");
  EXPECT_EQ(code(folder / "folder.safetensors"), "convert.target");
  folder.write("file", "x");
  EXPECT_EQ(code(folder / "file"), "convert.target");
  EXPECT_EQ(code(folder / "none/out.safetensors"), "io.not_found");
  EXPECT_EQ(code(folder / "file/out.safetensors"), "io.not_found");
}

class Stopper final : public Observer {
 public:
  bool on_progress(const Progress& /*progress*/) override { return false; }
};

// Whatever ends it early: no file under any name, and an old target as it was.
TEST_F(Target, AFailureLeavesNothing) {
  folder.write("old.safetensors", "old");
  folder.write("joined/config.json", "{}");
  const auto before = names_in(folder.path());
  FaultyStorage faulty(
      local_storage(),
      {.path_end = "source.safetensors", .offset_begin = 300'000, .skip = 0, .code = "io.read"});
  Stopper stopper;
  for (const char* name : {"old.safetensors", "new.safetensors", "joined", "new"}) {
    const std::string target = folder / name;
    for (const std::uint64_t shard : {100'000u, 5'000'000u}) {
      const Conversion conversion =
          make_conversion(open_checkpoint(source),
                          {.one_file = target.ends_with(".safetensors"), .shard_bytes_max = shard});
      const auto error = error_of([&] { convert(conversion, target, nullptr, &faulty); });
      ASSERT_TRUE(error.has_value());
      EXPECT_EQ(error->code(), "io.read");
      EXPECT_FALSE(error->where().tensor.empty());
      EXPECT_EQ(code_of([&] { convert(conversion, target, &stopper); }), "cancelled");
    }
  }
  EXPECT_EQ(names_in(folder.path()), before);
  EXPECT_EQ(read_file(folder / "old.safetensors"), "old");
}

TEST_F(Target, AChangedSourceIsFound) {
  const Conversion conversion = make_conversion(open_checkpoint(source));
  fs::last_write_time(source, fs::file_time_type::clock::now() + std::chrono::hours(1));
  EXPECT_EQ(code_of([&] { convert(conversion, folder / "out.safetensors"); }), "io.changed");
  // While it is read.
  const Conversion again = make_conversion(open_checkpoint(source));
  LoggingStorage watched(local_storage());
  std::atomic<int> reads = 0;
  watched.watch().before_read = [&](const Access& access) {
    if (access.offset < 10'000 || reads++ > 0) return;
    fs::last_write_time(source, fs::file_time_type::clock::now() + std::chrono::hours(2));
  };
  EXPECT_EQ(code_of([&] { convert(again, folder / "out.safetensors", nullptr, &watched); }),
            "io.changed");
  EXPECT_THAT(names_in(folder.path()), ElementsAre("in", "in/source.safetensors"));
}

TEST_F(Target, AFullDiskIsFoundBeforeAnythingIsWritten) {
  fs::create_directory(folder / "disk");
  if (::mount("tmpfs", (folder / "disk").c_str(), "tmpfs", 0, "size=512k") != 0) {
    GTEST_SKIP() << "no permission to mount a small disk";
  }
  EXPECT_EQ(code(folder / "disk/out.safetensors"), "io.no_space");
  EXPECT_EQ(code(folder / "disk/out"), "io.no_space");
  EXPECT_THAT(names_in(folder / "disk"), IsEmpty());
  // The control: a smaller one fits.
  const std::string small =
      folder.write("small.safetensors", safetensors_bytes({{"a", "U8", {9}, some_bytes(9)}}));
  EXPECT_EQ(code(folder / "disk/out.safetensors", small), "");
  ::umount((folder / "disk").c_str());
}

TEST(ConvertText, SaysWhatHappensWithoutControlCharacters) {
  const TemporaryFolder folder;
  const std::string source = folder.write(
      "source.safetensors", safetensors_bytes({{"a\x1b[2J", "F32", {2}, some_bytes(8)}}));
  const Conversion conversion = make_conversion(open_checkpoint(source), {.dtype = Dtype::f16});
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
