#include "kernels/quantize.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>

#include "codec/encode.h"
#include "convert/choose/choose.h"
#include "convert/choose/module_wildcards.h"
#include "convert/choose/quantize_config.h"
#include "convert/json_text.h"
#include "loadstone/convert.h"
#include "loadstone/error.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/samples.h"

namespace loadstone::test {

namespace {

namespace fs = std::filesystem;
using namespace ::testing;

// Returns random BF16 values between -size and size.
std::string numbers(std::size_t count, float size, unsigned seed) {
  std::string bytes;
  std::uint32_t state = seed * 2654435761u + 1;
  for (std::size_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    const float number = (static_cast<float>(state >> 8) / 8388608.0F - 1.0F) * size;
    bytes += raw(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(number) >> 16));
  }
  return bytes;
}

struct Matrix {
  std::string name;
  std::uint64_t rows;
  std::uint64_t columns;
  float size;
};

// Returns the matrices of two layers. Matrices that share a scale are in different shards.
const std::vector<Matrix>& matrices() {
  static const std::vector<Matrix> all = {
      {"model.embed_tokens.weight", 64, 128, 1},
      {"model.layers.0.self_attn.q_proj.weight", 96, 128, 1},
      {"model.layers.0.self_attn.k_proj.weight", 32, 128, 2},
      {"model.layers.0.mlp.gate.weight", 4, 128, 1},
      {"model.layers.0.mlp.experts.0.gate_proj.weight", 200, 128, 3},
      {"model.layers.0.mlp.experts.0.down_proj.weight", 128, 208, 3},
      {"model.layers.0.self_attn.v_proj.weight", 32, 128, 4},
      {"model.layers.0.self_attn.o_proj.weight", 128, 96, 1},
      {"model.layers.0.mlp.experts.0.up_proj.weight", 200, 128, 5},
      {"model.layers.1.mlp.down_proj.weight", 128, 100, 1},
      {"lm_head.weight", 64, 128, 1},
  };
  return all;
}

std::string value_of(std::size_t index) {
  const Matrix& matrix = matrices()[index];
  return numbers(matrix.rows * matrix.columns, matrix.size, static_cast<unsigned>(index));
}

// Writes a folder with two shards and a config. Returns its path.
std::string model_folder(const TemporaryFolder& folder) {
  std::vector<FileTensor> shards[2];
  std::map<std::string, std::string> index;
  for (std::size_t i = 0; i < matrices().size(); ++i) {
    const Matrix& matrix = matrices()[i];
    const std::size_t shard = i < 6 ? 0 : 1;
    shards[shard].push_back({matrix.name, "BF16", {matrix.rows, matrix.columns}, value_of(i)});
    index[matrix.name] =
        shard == 0 ? "a-00001-of-00002.safetensors" : "a-00002-of-00002.safetensors";
  }
  fs::create_directory(folder / "model");
  folder.write("model/a-00001-of-00002.safetensors", safetensors_bytes(shards[0]));
  folder.write("model/a-00002-of-00002.safetensors", safetensors_bytes(shards[1]));
  folder.write("model/a.safetensors.index.json", index_json(index));
  folder.write("model/config.json",
               "{\n  \"model_type\": \"qwen3_moe\",\n  \"num_hidden_layers\": 2\n}\n");
  return folder / "model";
}

ConvertOptions quantizing(const std::string& encoding, const std::string& source) {
  ConvertOptions options;
  options.one_file = false;
  options.quantize.formats = {{.quantization = parse_quantization(encoding)}};
  options.folder = read_model_folder(source);
  return options;
}

std::string part_of(const Catalog& catalog, const std::string& name) {
  const TensorInfo& tensor = catalog.tensors().at(catalog.find(name).value());
  return read_file(catalog.shards()[tensor.shard].path)
      .substr(tensor.offset_begin, tensor.byte_count());
}

float largest_of(const std::string& value) {
  float largest = 0;
  for (std::size_t at = 0; at < value.size(); at += 2) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, value.data() + at, sizeof(bits));
    largest =
        std::max(largest, std::abs(std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16)));
  }
  return largest;
}

// Encodes a matrix in one call, with the scale for the largest magnitude `amax`. Returns its
// components.
std::vector<std::string> parts_by_hand(std::size_t index, const Quantization& quantization,
                                       float amax) {
  const Matrix& matrix = matrices()[index];
  const std::string value = value_of(index);
  QuantizedLayout form;
  EXPECT_FALSE(
      prepare_quantization(quantization, {matrix.rows, matrix.columns}, Dtype::bf16, form));
  std::vector<std::string> parts;
  std::vector<std::byte*> places;
  for (const QuantizedPart& part : form.parts) parts.emplace_back(part.byte_count(), '\0');
  for (std::string& part : parts) places.push_back(reinterpret_cast<std::byte*>(part.data()));
  std::vector<std::byte> scratch(form.scratch_bytes);
  const std::vector<float> known(form.needs_amax ? 1 : 0, amax);
  quantize_window(form, 0, form.elements, reinterpret_cast<const std::byte*>(value.data()), places,
                  known, scratch.data());
  finish_quantized(form, places, known, scratch.data());
  return parts;
}

TEST(QuantizeFiles, PartnersInDifferentShardsShareTheirScale) {
  const TemporaryFolder folder;
  const std::string source = model_folder(folder);
  const ConvertOptions options = quantizing("nvfp4", source);
  converted(source, folder / "out", options);
  const auto catalog = open_checkpoint(folder / "out");
  const std::vector<std::vector<std::size_t>> groups = {{1, 2, 6}, {4, 8}, {5}, {7}};
  for (const auto& group : groups) {
    float amax = 0;
    for (const std::size_t i : group) amax = std::max(amax, largest_of(value_of(i)));
    for (const std::size_t i : group) {
      const auto parts = parts_by_hand(i, options.quantize.formats[0].quantization, amax);
      const std::string& name = matrices()[i].name;
      EXPECT_TRUE(part_of(*catalog, name) == parts[0]) << name;
      EXPECT_TRUE(part_of(*catalog, name + "_scale") == parts[1]) << name;
      EXPECT_TRUE(part_of(*catalog, name + "_scale_2") == parts[2]) << name;
      // Control: the matrix alone, without its partners, would get a different scale.
      const auto alone =
          parts_by_hand(i, options.quantize.formats[0].quantization, largest_of(value_of(i)));
      EXPECT_EQ(alone[2] == parts[2], largest_of(value_of(i)) == amax) << name;
    }
  }
  for (const std::size_t i : {0, 3, 9, 10}) {  // [9] has 100 columns, not whole blocks
    EXPECT_TRUE(part_of(*catalog, matrices()[i].name) == value_of(i)) << matrices()[i].name;
  }
}

TEST(QuantizeFiles, BytesDependOnNeitherMemoryNorThreads) {
  const TemporaryFolder folder;
  const std::string source = model_folder(folder);
  for (const std::string encoding : {"nvfp4", "fp8", "nf4", "int8"}) {
    ConvertOptions options = quantizing(encoding, source);
    options.threads = 4;
    converted(source, folder / (encoding + "-wide"), options);
    options.memory_bytes_max = 1;
    options.shard_bytes_max = 30000;
    const Conversion refused = make_conversion(open_checkpoint(source), options);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.plan.findings[0].code, "plan.over_budget");
    options.memory_bytes_max = std::stoull(refused.plan.findings[0].expected);
    const Conversion narrow = make_conversion(open_checkpoint(source), options);
    EXPECT_TRUE(narrow.ok());
    EXPECT_LE(narrow.peak_bytes, *options.memory_bytes_max);
    convert(narrow, folder / (encoding + "-narrow"));
    --*options.memory_bytes_max;
    EXPECT_FALSE(make_conversion(open_checkpoint(source), options).ok());
    const auto wide = open_checkpoint(folder / (encoding + "-wide"));
    const auto shards = open_checkpoint(folder / (encoding + "-narrow"));
    EXPECT_GT(shards->shards().size(), wide->shards().size());
    ASSERT_EQ(shards->tensors().size(), wide->tensors().size());
    for (const TensorInfo& tensor : wide->tensors()) {
      EXPECT_TRUE(part_of(*wide, tensor.name) == part_of(*shards, tensor.name)) << tensor.name;
    }
  }
}

// If all components and partners are in one shard, no shard depends on another one.
TEST(QuantizeFiles, PartnersAndPartsStandInOneFile) {
  const TemporaryFolder folder;
  const std::string source = model_folder(folder);
  ConvertOptions options = quantizing("nvfp4", source);
  options.shard_bytes_max = 1;
  const Conversion conversion = make_conversion(open_checkpoint(source), options);
  std::map<std::string, std::string> file_of;
  for (const OutputFile& file : conversion.files) {
    for (const OutputTensor& tensor : file.tensors) file_of[tensor.name] = file.name;
  }
  const std::string layer = "model.layers.0.self_attn.";
  EXPECT_EQ(file_of.at(layer + "q_proj.weight"), file_of.at(layer + "v_proj.weight_scale_2"));
  EXPECT_EQ(file_of.at(layer + "k_proj.weight"), file_of.at(layer + "v_proj.weight"));
  EXPECT_NE(file_of.at(layer + "q_proj.weight"), file_of.at(layer + "o_proj.weight"));
}

TEST(QuantizeFiles, NumbersThatAreNotFiniteAreNamed) {
  const TemporaryFolder folder;
  for (const std::uint64_t rows : {32u, 40000u}) {  // the matrix takes one window or several
    std::string value = numbers(rows * 64, 1, 1);
    value.replace(2 * 1000, 2, "\xc0\x7f", 2);
    const std::string source =
        folder.write("nan.safetensors",
                     safetensors_bytes({{"layers.0.up_proj.weight", "BF16", {rows, 64}, value}}));
    for (const std::string encoding : {"nvfp4", "fp8", "nf4"}) {
      ConvertOptions options = quantizing(encoding, source);
      options.staging_bytes_max = 256 << 10;
      const auto error = error_of([&] { converted(source, folder / "out", options); });
      ASSERT_TRUE(error);
      EXPECT_EQ(error->code(), "q.nan");
      EXPECT_EQ(error->where().tensor, "layers.0.up_proj.weight");
      EXPECT_THAT(error->where().found, HasSubstr("element 1000 "));
      EXPECT_FALSE(fs::exists(folder / "out"));
      options.quantize.allow_non_finite = true;
      const ConvertReport report = converted(source, folder / "out", options);
      ASSERT_FALSE(report.findings.empty());
      EXPECT_EQ(report.findings[0].code, "q.nan");
      if (encoding == "fp8") {
        const auto catalog = open_checkpoint(folder / "out");
        float scale = 0;
        std::memcpy(&scale, part_of(*catalog, "layers.0.up_proj.weight_scale").data(), 4);
        EXPECT_TRUE(std::isfinite(scale) && scale > 0);
      }
      fs::remove_all(folder / "out");
    }
  }
}

TEST(QuantizeFiles, StylesHaveNamesAndShapesOfTheirOwn) {
  const TemporaryFolder folder;
  const std::string source = model_folder(folder);
  ConvertOptions options = quantizing("nvfp4", source);
  converted(source, folder / "modelopt", options);
  options.quantize.style = QuantizeStyle::compressed_tensors;
  converted(source, folder / "compressed", options);
  const auto first = open_checkpoint(folder / "modelopt");
  const auto second = open_checkpoint(folder / "compressed");
  const std::string module = "model.layers.0.self_attn.o_proj.weight";
  EXPECT_TRUE(part_of(*first, module) == part_of(*second, module + "_packed"));
  EXPECT_TRUE(part_of(*first, module + "_scale") == part_of(*second, module + "_scale"));
  float scale = 0;
  float inverse = 0;
  std::memcpy(&scale, part_of(*first, module + "_scale_2").data(), sizeof(scale));
  std::memcpy(&inverse, part_of(*second, module + "_global_scale").data(), sizeof(inverse));
  EXPECT_EQ(inverse, 1.0F / scale);
  EXPECT_TRUE(fs::exists(folder / "modelopt/hf_quant_config.json"));
  EXPECT_FALSE(fs::exists(folder / "compressed/hf_quant_config.json"));
  const std::string config = read_file(folder / "compressed/config.json");
  EXPECT_THAT(config, HasSubstr("\"nvfp4-pack-quantized\""));
  EXPECT_THAT(config, HasSubstr("\"model_type\": \"qwen3_moe\",\n  \"num_hidden_layers\": 2,"));
  options.quantize.formats = {{.quantization = parse_quantization("int4-awq")}};
  EXPECT_EQ(code_of([&] { static_cast<void>(make_conversion(open_checkpoint(source), options)); }),
            "plan.options");
}

TEST(QuantizeFiles, StacksOfExpertsBecomeTheirWeights) {
  const TemporaryFolder folder;
  const std::string gate_up = numbers(std::size_t{3} * 64 * 32, 1, 1);
  const std::string source = folder.write(
      "stack.safetensors",
      safetensors_bytes({{"layers.0.mlp.experts.gate_up_proj", "BF16", {3, 64, 32}, gate_up}}));
  converted(source, folder / "out", quantizing("int8", source));
  const auto catalog = open_checkpoint(folder / "out");
  EXPECT_EQ(catalog->tensors().size(), 18u);  // three experts, two weights, three components
  const std::string rows = gate_up.substr(2 * (2 * 64 + 32) * 32, 2 * 32 * 32);
  const std::string alone =
      folder.write("alone.safetensors",
                   safetensors_bytes({{"layers.0.up_proj.weight", "BF16", {32, 32}, rows}}));
  converted(alone, folder / "alone", quantizing("int8", alone));
  EXPECT_TRUE(part_of(*catalog, "layers.0.mlp.experts.2.up_proj.weight") ==
              part_of(*open_checkpoint(folder / "alone"), "layers.0.up_proj.weight"));
}

// A library may build a stack's layer under a different prefix, and with its own names inside.
TEST(QuantizeFiles, StacksThatStayPlainAreIgnoredUnderAnyPrefix) {
  const TemporaryFolder folder;
  const std::string values = numbers(std::size_t{3} * 64 * 32, 1, 1);
  const std::string source = folder.write(
      "stack.safetensors",
      safetensors_bytes({{"layers.0.mlp.experts.gate_up_proj", "BF16", {3, 64, 32}, values},
                         {"layers.0.self_attn.q_proj.weight", "BF16", {192, 32}, values}}));
  ConvertOptions options = quantizing("fp8-channel", source);
  options.quantize.style = QuantizeStyle::compressed_tensors;
  options.quantize.exclude = {"experts"};
  converted(source, folder / "out", options);
  EXPECT_THAT(read_file(folder / "out/config.json"),
              HasSubstr(R"("re:(.*\\.)?layers.0.mlp.experts\\..*")"));
}

TEST(QuantizeFiles, ChoicesFollowRulesPatternsAndOptions) {
  const auto chosen = [](const std::string& name, QuantizeOptions options) {
    Recipes recipes;
    recipes.targets.push_back({.target = name, .shape = {64, 64}, .dtype = Dtype::bf16});
    std::vector<Finding> findings;
    ConvertOptions convert;
    convert.quantize = std::move(options);
    convert.folder.config = R"({"model_type": "deepseek_v3", "num_hidden_layers": 4})";
    const Choices choices = choose_quantized(convert, 100, recipes, findings);
    const auto found = choices.quantize.find(name);
    return found == choices.quantize.end() ? "" : found->second.encoding;
  };
  QuantizeOptions options;
  options.formats = {{.pattern = "experts", .quantization = {.encoding = "nvfp4"}},
                     {.pattern = "o_proj", .quantization = {.encoding = "none"}},
                     {.quantization = {.encoding = "fp8"}}};
  EXPECT_EQ(chosen("model.layers.3.mlp.experts.7.up_proj.weight", options), "nvfp4");
  EXPECT_EQ(chosen("model.layers.3.mlp.shared_experts.up_proj.weight", options), "nvfp4");
  EXPECT_EQ(chosen("model.layers.3.mlp.up_proj.weight", options), "fp8");
  EXPECT_EQ(chosen("model.layers.3.self_attn.o_proj.weight", options), "");
  for (const char* name :
       {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight",
        "model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.router.weight",
        "model.layers.0.mlp.shared_expert_gate.weight", "model.layers.0.input_layernorm.weight",
        "model.visual.blocks.0.attn.qkv.weight", "model.layers.0.self_attn.kv_b_proj.weight",
        "model.layers.4.mlp.up_proj.weight", "mtp.layers.0.mlp.up_proj.weight",
        "model.layers.0.linear_attn.conv1d.weight", "model.layers.0.mlp.up_proj.bias"}) {
    EXPECT_EQ(chosen(name, options), "") << name;
  }
  options.include = {"^lm_head"};
  options.exclude = {R"(layers\.0\.)"};
  EXPECT_EQ(chosen("lm_head.weight", options), "fp8");
  EXPECT_EQ(chosen("model.layers.0.mlp.up_proj.weight", options), "");
  options.exclude = {"("};
  EXPECT_EQ(code_of([&] { chosen("lm_head.weight", options); }), "plan.options");
}

TEST(QuantizeFiles, MembersOfAConfigAreChangedInPlace) {
  const std::string text = "{\n    \"a\": [1, {\"b\": \"}\"}],\n    \"b\": 2\n}\n";
  EXPECT_EQ(with_member(text, "b", "{}"), "{\n    \"a\": [1, {\"b\": \"}\"}],\n    \"b\": {}\n}\n");
  EXPECT_EQ(with_member(text, "c", "3"),
            "{\n    \"a\": [1, {\"b\": \"}\"}],\n    \"b\": 2,\n    \"c\": 3\n}\n");
  EXPECT_EQ(with_member("{}", "c", "3"), "{\n  \"c\": 3\n}");
  const auto without = [](std::string_view from, std::string_view key, unsigned levels = 0) {
    return without_members(
        from, [&](std::string_view each, unsigned) { return each == key; }, levels);
  };
  EXPECT_EQ(without(text, "a"), "{\n    \"b\": 2\n}\n");
  EXPECT_EQ(without(text, "b"), "{\n    \"a\": [1, {\"b\": \"}\"}]\n}\n");
  EXPECT_EQ(without(text, "c"), text);
  EXPECT_EQ(without(R"({"b": 1, "b": 2, "\u0062": 3})", "b"), "{}");
  EXPECT_EQ(without(R"({"a": {"b": 1, "c": {"b": 2}}, "b": 3})", "b", 1),
            R"({"a": {"c": {"b": 2}}})");
  EXPECT_TRUE(is_json_object(text));
  EXPECT_FALSE(is_json_object("[1]"));
  EXPECT_EQ(value_at<std::uint64_t>(text, "/b"), 2u);
}

// Python's json writes literals that JSON lacks, such as NaN.
TEST(QuantizeFiles, ConfigsOfPythonAreRead) {
  const std::string text =
      R"({"limit": [0.0, Infinity], "least": -Infinity, "no": NaN, "b": "NaN \" Infinity",)"
      R"( "c": 7})";
  EXPECT_TRUE(is_json_object(text));
  EXPECT_EQ(string_member(text, "b"), "NaN \" Infinity");
  EXPECT_EQ(value_at<std::uint64_t>(text, "/c"), 7u);
  EXPECT_EQ(with_member(text, "c", "8"), text.substr(0, text.size() - 2) + "8}");
  EXPECT_FALSE(is_json_object(R"({"a": Infinite})"));
  EXPECT_FALSE(is_json_object(R"({"a": NaN)"));
}

TEST(QuantizeFiles, PlainModulesAreSummedUpByPrefixes) {
  const Quantization any;
  QuantizedModules modules;
  modules.plain = {"lm_head", "model.layers.0.mlp.gate", "vision.blocks.0.a", "vision.blocks.1.b"};
  modules.quantized = {{"model.layers.0.mlp.gate_proj", &any}};
  EXPECT_THAT(summed_up(modules), ElementsAre("lm_head", "model.layers.0.mlp.gate", "vision*"));
  const std::string stack = "model.layers.0.mlp.experts";
  modules.plain = {stack, stack + ".0.gate_proj", stack + ".gate_up_proj"};
  EXPECT_THAT(summed_up(modules), ElementsAre(stack + "*"));
}

TEST(QuantizeFiles, LongListsOfPlainModulesHaveStarsForNumbers) {
  const Quantization any;
  QuantizedModules modules;
  for (const char* const layer : {"0", "1", "10"}) {
    for (const char* const expert : {"0", "1", "10"}) {
      const std::string name = std::string("model.layers.") + layer + ".moe." + expert;
      modules.plain.push_back(name + ".w2");
      modules.quantized.emplace_back(name + ".w1", &any);
    }
  }
  EXPECT_THAT(summed_up(modules), ElementsAre("model.layers.*.moe.*.w2"));
  modules.quantized.emplace_back("model.layers.1.moe.1.w2", &any);
  modules.plain.erase(modules.plain.begin() + 4);
  modules.plain.push_back("model.a[1].b");
  modules.quantized.emplace_back("model.a", &any);
  EXPECT_THAT(summed_up(modules),
              ElementsAre("model.a[[]1]*", "model.layers.0.moe.*.w2", "model.layers.1.moe.0.w2",
                          "model.layers.1.moe.10.w2", "model.layers.10.moe.*.w2"));
}

TEST(QuantizeFiles, FilesBesideTheModelComeAlong) {
  const TemporaryFolder folder;
  const std::string source = model_folder(folder);
  for (const char* name : {"tokenizer.json", "README.md", "modeling.py", "notes.bin", ".hidden"}) {
    folder.write(std::string("model/") + name, name);
  }
  folder.write("elsewhere.json", "{}");
  fs::create_symlink(folder / "model/config.json", folder / "model/tokenizer_config.json");
  fs::create_symlink(folder / "elsewhere.json", folder / "model/vocab.json");
  const ConvertOptions options = quantizing("fp8", source);
  const ConvertReport report = converted(source, folder / "out", options);
  const auto names = names_in(folder / "out");
  EXPECT_THAT(names, Contains("tokenizer.json"));
  EXPECT_THAT(names, Contains("README.md"));
  EXPECT_THAT(names, Contains("config.json"));
  EXPECT_THAT(names, Contains("tokenizer_config.json"));
  for (const char* name : {"modeling.py", "notes.bin", ".hidden", "vocab.json"}) {
    EXPECT_THAT(names, Not(Contains(name)));
  }
  EXPECT_THAT(report.findings, Contains(::testing::Field(&Finding::code, "convert.not_copied")));
  EXPECT_THAT(read_model_folder(source, true).files,
              Contains(::testing::Field(&ExtraFile::name, "modeling.py")));
  EXPECT_THAT(read_model_folder(folder / "nothing").files, IsEmpty());
}

}  // namespace

}  // namespace loadstone::test
