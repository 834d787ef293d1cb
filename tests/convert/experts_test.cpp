// Tests conversions of models with incomplete experts, and of headers that declare more experts
// than the file contains.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <filesystem>
#include <set>

#include "loadstone/error.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/samples.h"

namespace loadstone::test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

constexpr std::string_view prefix = "model.layers.5.mlp.experts";

struct Sample {
  std::set<std::string> lost{};   // missing tensors, such as "1.up_proj"
  std::set<std::string> stray{};  // same notation
};

// Returns three experts with matrices of 32 x 64 values.
std::vector<FileTensor> experts(const Sample& sample = {}) {
  std::set<std::string> names = sample.stray;
  for (const int e : {0, 1, 2}) {
    for (const char* role : {"gate_proj", "up_proj", "down_proj"}) {
      const std::string name = fmt::format("{}.{}", e, role);
      if (!sample.lost.contains(name)) names.insert(name);
    }
  }
  std::vector<FileTensor> tensors;
  for (const std::string& name : names) {
    const bool is_down = name.ends_with("down_proj");
    const std::vector<std::uint64_t> shape =
        is_down ? std::vector<std::uint64_t>{64, 32} : std::vector<std::uint64_t>{32, 64};
    tensors.push_back(
        {fmt::format("{}.{}.weight", prefix, name), "BF16", shape, std::string(4096, '\x3c')});
  }
  return tensors;
}

ConvertOptions option(const char* what) {
  ConvertOptions options;
  options.one_file = false;
  options.shard_bytes_max = 16'384;
  if (what == std::string_view("fused")) options.experts = ExpertLayout::fused;
  if (what == std::string_view("separate")) options.experts = ExpertLayout::separate;
  if (what == std::string_view("nvfp4")) {
    options.quantize.formats = {{.quantization = parse_quantization("nvfp4")}};
  }
  return options;
}

constexpr const char* all_options[] = {"keep", "fused", "separate", "nvfp4"};

// Writes all tensors to one file, or each tensor to its own shard. Returns the path.
std::string written(const TemporaryFolder& folder, const std::vector<FileTensor>& tensors,
                    bool shards) {
  if (!shards) return folder.write("source.safetensors", safetensors_bytes(tensors));
  std::map<std::string, std::string> map;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::string name = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, tensors.size());
    folder.write("source/" + name, safetensors_bytes({tensors[i]}));
    map[tensors[i].name] = name;
  }
  folder.write("source/model.safetensors.index.json", index_json(map));
  return folder / "source";
}

TEST(ConvertExperts, ALostTensorOfOneExpertIsNamedWhateverIsAsked) {
  const std::vector<Sample> samples = {{.lost = {"1.up_proj"}},
                                       {.lost = {"1.up_proj"}, .stray = {"3.up_proj"}},
                                       {.lost = {"1.up_proj"}, .stray = {"4000000000.up_proj"}},
                                       {.lost = {"1.up_proj"}, .stray = {"01.up_proj"}}};
  for (const bool shards : {false, true}) {
    for (const Sample& sample : samples) {
      const TemporaryFolder folder;
      const std::string source = written(folder, experts(sample), shards);
      for (const char* what : all_options) {
        const auto error = error_of([&] { converted(source, folder / "out", option(what)); });
        ASSERT_TRUE(error) << what;
        EXPECT_EQ(error->code(), "plan.missing") << what;
        EXPECT_THAT(error->what(), HasSubstr("layer 5 lacks expert"));
        EXPECT_THAT(error->what(), HasSubstr("'model.layers.5.mlp.experts.1.up_proj.weight'"));
        EXPECT_FALSE(fs::exists(folder / "out"));
      }
    }
  }
}

TEST(ConvertExperts, APartOfAConversionRefusesThemToo) {
  const TemporaryFolder folder;
  const std::string source = written(folder, experts({.lost = {"2.down_proj"}}), false);
  const auto conversion = make_conversion(open_checkpoint(source), option("keep"));
  EXPECT_FALSE(conversion.ok());
  const auto error = error_of([&] {
    (void)convert(conversion, folder / "out", {.part = ConvertPart{2, 2}});
  });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), "plan.missing");
}

TEST(ConvertExperts, WholeOnesAreConverted) {
  for (const bool shards : {false, true}) {
    for (const char* what : all_options) {
      const TemporaryFolder folder;
      converted(written(folder, experts(), shards), folder / "out", option(what));
      EXPECT_TRUE(fs::exists(folder / "out")) << what;
    }
  }
}

TEST(ConvertExperts, OneExpertInTwoSpellingsIsAnError) {
  const TemporaryFolder folder;
  const std::string source =
      written(folder, experts({.stray = {"01.gate_proj", "01.up_proj", "01.down_proj"}}), false);
  for (const char* what : all_options) {
    const auto error = error_of([&] { converted(source, folder / "out", option(what)); });
    ASSERT_TRUE(error) << what;
    EXPECT_EQ(error->code(), "plan.series");
    EXPECT_THAT(error->what(), HasSubstr("experts.01."));
  }
}

TEST(ConvertExperts, TwoSetsOfNamesAreNotFused) {
  const TemporaryFolder folder;
  std::set<std::string> stray;
  for (const int e : {0, 1, 2}) {
    for (const char* role : {"w1", "w3", "w2"}) stray.insert(fmt::format("{}.{}", e, role));
  }
  const std::string source = written(folder, experts({.stray = stray}), false);
  const auto error = error_of([&] { converted(source, folder / "out", option("fused")); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), "plan.duplicate");
  EXPECT_THAT(error->what(), HasSubstr("experts.0.down_proj"));
  EXPECT_THAT(error->what(), HasSubstr(".w1."));
  EXPECT_FALSE(fs::exists(folder / "out"));
}

// A single shard of a sharded model may be copied, but its experts cannot be fused.
TEST(ConvertExperts, OneShardOfSeveralIsCopiedWithAWarning) {
  const TemporaryFolder folder;
  const std::string source = folder.write("model-00002-of-00003.safetensors",
                                          safetensors_bytes(experts({.lost = {"0.up_proj"}})));
  const ConvertReport report = converted(source, folder / "out.safetensors");
  ASSERT_EQ(report.findings.size(), 2u);
  EXPECT_EQ(report.findings[0].code, "ix.gap");
  for (const Finding& each : report.findings) EXPECT_EQ(each.severity, Severity::warning);
  EXPECT_EQ(code_of([&] { converted(source, folder / "fused", option("fused")); }), "plan.missing");
}

// Some experts may lack companion tensors that other experts have.
TEST(ConvertExperts, ScalesOfActivationsAreNoPartOfTheSeries) {
  const TemporaryFolder folder;
  auto tensors = experts();
  tensors.push_back({fmt::format("{}.2.up_proj.input_scale", prefix), "F32", {}, raw(1.0F)});
  converted(written(folder, tensors, false), folder / "out", option("keep"));
}

// ---- claims

TEST(ConvertExperts, ClaimedNumbersAndExtentsCostNothing) {
  const std::uint64_t claimed = 1'000'000'000;
  const auto stack = [&](std::string_view role, std::vector<std::uint64_t> shape) {
    return FileTensor{fmt::format("{}.{}", prefix, role), "BF16", std::move(shape), {}};
  };
  const std::vector<std::vector<FileTensor>> files = {
      {stack("gate_up_proj", {claimed, 0, 128}), stack("down_proj", {claimed, 128, 0})},
      {{std::string(10'000, 'a') + ".experts.99999.up_proj.weight", "F32", {1}, raw(0.0F)}},
      {{"a.experts.18446744073709551615.up_proj.weight", "F32", {1}, raw(0.0F)}}};
  for (const auto& tensors : files) {
    const TemporaryFolder folder;
    const std::string source = folder.write("claims.safetensors", safetensors_bytes(tensors));
    for (const char* what : all_options) {
      const auto conversion = make_conversion(open_checkpoint(source), option(what));
      EXPECT_LE(conversion.plan.targets.size(), tensors.size()) << what;
      std::size_t names = 0;
      for (const Finding& finding : conversion.plan.findings) {
        for (const std::string& name : finding.sources) names += name.size();
      }
      EXPECT_LE(names, 1'000'000u) << what;
    }
  }
}

TEST(ConvertExperts, StacksOfTinyExpertsAreNotCutWithoutEnd) {
  const TemporaryFolder folder;
  const std::uint64_t count = 200'000;
  const std::string source =
      folder.write("tiny.safetensors", safetensors_bytes({{fmt::format("{}.gate_up_proj", prefix),
                                                           "BF16",
                                                           {count, 2, 1},
                                                           std::string(4 * count, '\0')},
                                                          {fmt::format("{}.down_proj", prefix),
                                                           "BF16",
                                                           {count, 1, 1},
                                                           std::string(2 * count, '\0')}}));
  for (const char* what : {"separate", "nvfp4"}) {
    const auto conversion = make_conversion(open_checkpoint(source), option(what));
    EXPECT_FALSE(conversion.ok()) << what;
    EXPECT_EQ(conversion.plan.findings.front().code, "plan.shape");
    EXPECT_LE(conversion.plan.targets.size(), 2u);
  }
}

}  // namespace
}  // namespace loadstone::test
