// Tests names, types and keys of quantized GGUF output. tests/kernels/gguf_encode_test.cpp tests
// the bytes of blocks, and gguf_mix_test.cpp tests the type mixes.
#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>
#include <memory>

#include "loadstone/convert.h"
#include "loadstone/error.h"
#include "loadstone/verify.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/samples.h"

namespace loadstone::test {

namespace {

using namespace ::testing;

// Returns finite BF16 values around 1.
std::string numbers(std::uint64_t count, unsigned seed) {
  std::string bytes = some_bytes(count * 2, seed);
  for (std::size_t i = 1; i < bytes.size(); i += 2) {
    bytes[i] = static_cast<char>((bytes[i] & 0x80) | 0x3e | (bytes[i] & 1));
  }
  return bytes;
}

// Returns the values of numbers() as F32.
std::string float_numbers(std::uint64_t count, unsigned seed) {
  const std::string halves = numbers(count, seed);
  std::string bytes;
  for (std::size_t i = 0; i < halves.size(); i += 2) {
    bytes += std::string(2, '\0') + halves.substr(i, 2);
  }
  return bytes;
}

std::string llama_file() {
  const auto tensor = [](const char* name, std::vector<std::uint64_t> shape, unsigned seed) {
    std::uint64_t count = 1;
    for (const std::uint64_t extent : shape) count *= extent;
    return FileTensor{name, "BF16", std::move(shape), numbers(count, seed)};
  };
  return safetensors_bytes({tensor("token_embd.weight", {24, 256}, 1),
                            {"output_norm.weight", "F32", {256}, float_numbers(256, 2)},
                            tensor("blk.0.attn_norm.weight", {256}, 3),
                            tensor("blk.0.attn_q.weight", {256, 256}, 4),
                            tensor("blk.0.attn_v.weight", {128, 256}, 5),
                            tensor("blk.0.ffn_gate_inp.weight", {4, 256}, 6),
                            tensor("blk.0.ffn_up.weight", {96, 256}, 7),
                            tensor("blk.0.ffn_down.weight", {256, 96}, 8),
                            tensor("blk.0.odd.weight", {16, 40}, 9),
                            tensor("blk.1.attn_v.weight", {128, 256}, 10),
                            {"ids", "I64", {4}, some_bytes(32, 11)}});
}

MetadataValue number(std::uint64_t value) { return {.value = value, .type = MetadataType::u32}; }

ConvertOptions llama_options(const std::string& format) {
  ConvertOptions options;
  options.format = FileFormat::gguf;
  options.metadata = {{"general.architecture", {.value = "llama"}},
                      {"llama.block_count", number(2)},
                      {"llama.attention.head_count", number(2)},
                      {"llama.attention.head_count_kv", number(1)},
                      {"tokenizer.ggml.model", {.value = "none"}}};
  options.quantize.formats = {
      {.pattern = {},
       .quantization = parse_quantization(format, QuantizeMode::exact, FileFormat::gguf)}};
  return options;
}

QuantizeFormat format_for(const std::string& pattern, const std::string& name) {
  return {.pattern = pattern,
          .quantization = parse_quantization(name, QuantizeMode::exact, FileFormat::gguf)};
}

std::vector<std::string> types_in(const std::string& path) {
  std::vector<std::string> types;
  const auto catalog = open_checkpoint(path);
  for (const TensorInfo& tensor : catalog->tensors()) {
    types.push_back(tensor.name + " " + std::string(tensor.encoding.name()));
  }
  return types;
}

std::vector<std::string> codes_of(const Conversion& conversion) {
  std::vector<std::string> codes;
  for (const Finding& finding : conversion.plan.findings) codes.push_back(finding.code);
  return codes;
}

class GgufQuantize : public ::testing::Test {
 protected:
  Conversion planned(const ConvertOptions& options) const {
    return make_conversion(open_checkpoint(source_), options);
  }
  std::vector<std::string> types_with(const ConvertOptions& options) const {
    convert(planned(options), out_);
    return types_in(out_);
  }

  const TemporaryFolder folder_;
  const std::string source_ = folder_.write("source.safetensors", llama_file());
  const std::string out_ = folder_ / "out.gguf";
};

TEST_F(GgufQuantize, AMixGivesLlamaCppsTypes) {
  const ConvertOptions options = llama_options("Q4_K_M");
  EXPECT_THAT(types_with(options),
              ElementsAre("token_embd.weight Q6_K", "output_norm.weight F32",
                          "blk.0.attn_norm.weight F32", "blk.0.attn_q.weight Q4_K",
                          "blk.0.attn_v.weight Q4_K", "blk.0.ffn_gate_inp.weight BF16",
                          "blk.0.ffn_up.weight Q4_K", "blk.0.ffn_down.weight Q5_0",
                          "blk.0.odd.weight F16", "blk.1.attn_v.weight Q6_K", "ids I64"));
  const auto after = open_checkpoint(out_);
  EXPECT_EQ(std::get<std::uint64_t>(after->metadata().at("general.file_type").value), 15u);
  EXPECT_EQ(std::get<std::uint64_t>(after->metadata().at("general.quantization_version").value),
            2u);
  const Conversion conversion = planned(options);
  EXPECT_THAT(codes_of(conversion),
              ElementsAre("convert.fallback", "convert.fallback", "plan.cast", "plan.cast"));
  EXPECT_THAT(conversion.plan.findings[0].message,
              HasSubstr("do not consist of whole blocks of Q4_K"));
}

// verify reports changed values. It decodes blocks before it compares them, and accepts a wider
// dtype.
TEST_F(GgufQuantize, VerifyTellsTheModelFromAnother) {
  convert(planned(llama_options("q4_k_m")), out_);
  const auto source = open_checkpoint(source_);
  const auto told = [&](const std::string& path) {
    std::vector<std::string> names;
    for (const Difference& each : compare(*source, *open_checkpoint(path)).differences) {
      names.push_back(each.name);
    }
    return names;
  };
  EXPECT_THAT(told(out_), ElementsAre());
  const VerifyReport report = compare(*source, *open_checkpoint(out_));
  EXPECT_EQ(report.quantized.size(), 6u);
  ASSERT_EQ(report.rounded.size(), 1u);
  EXPECT_EQ(report.rounded[0].name, "blk.0.odd.weight");
  ASSERT_EQ(report.widened.size(), 1u);
  EXPECT_EQ(report.widened[0].name, "blk.0.attn_norm.weight");
  const auto after = open_checkpoint(out_);
  for (const char* const name : {"blk.0.attn_q.weight", "blk.0.attn_norm.weight"}) {
    std::string bytes = read_file(out_);
    const TensorInfo& damaged = after->tensors().at(after->find(name).value());
    std::ranges::reverse(bytes.begin() + static_cast<std::ptrdiff_t>(damaged.offset_begin),
                         bytes.begin() + static_cast<std::ptrdiff_t>(damaged.offset_end));
    EXPECT_THAT(told(folder_.write("damaged.gguf", bytes)), Contains(name));
  }
}

TEST_F(GgufQuantize, ThreadsAndMemoryChangeNoByte) {
  ConvertOptions options = llama_options("q4_k_m");
  convert(planned(options), out_);
  const std::string expected = read_file(out_);
  for (const unsigned threads : {1u, 3u}) {
    for (const std::uint64_t staging : {1u, 4096u, 8'000'000u}) {
      options.threads = threads;
      options.staging_bytes_max = staging;
      convert(planned(options), out_);
      EXPECT_TRUE(read_file(out_) == expected) << threads << " " << staging;
    }
  }
}

TEST_F(GgufQuantize, AnEncodingIsForAllAndPatternsGoFirst) {
  ConvertOptions options = llama_options("q5_k");  // not a mix: one type for all tensors
  options.quantize.formats.insert(
      options.quantize.formats.begin(),
      {format_for("attn_v", "q8_0"), format_for("up", "none"), format_for("token_embd", "f32")});
  options.quantize.include = {"gate_inp"};
  options.quantize.exclude = {"odd"};
  EXPECT_THAT(types_with(options),
              ElementsAre("token_embd.weight F32", "output_norm.weight F32",
                          "blk.0.attn_norm.weight F32", "blk.0.attn_q.weight Q5_K",
                          "blk.0.attn_v.weight Q8_0", "blk.0.ffn_gate_inp.weight Q5_K",
                          "blk.0.ffn_up.weight BF16", "blk.0.ffn_down.weight Q5_1",
                          "blk.0.odd.weight BF16", "blk.1.attn_v.weight Q8_0", "ids I64"));
  const auto after = open_checkpoint(out_);
  EXPECT_EQ(std::get<std::uint64_t>(after->metadata().at("general.file_type").value), 16u);
}

TEST_F(GgufQuantize, AMixOfNumbers) {
  EXPECT_THAT(types_with(llama_options("f16")),
              ElementsAre("token_embd.weight F16", "output_norm.weight F32",
                          "blk.0.attn_norm.weight F32", "blk.0.attn_q.weight F16",
                          "blk.0.attn_v.weight F16", "blk.0.ffn_gate_inp.weight BF16",
                          "blk.0.ffn_up.weight F16", "blk.0.ffn_down.weight F16",
                          "blk.0.odd.weight F16", "blk.1.attn_v.weight F16", "ids I64"));
}

// Quantizing in two steps through a BF16 file gives the same bytes as one step, because the model's
// values are BF16.
TEST_F(GgufQuantize, QuantizingAWrittenFileGivesTheSameBytes) {
  convert(planned(llama_options("q4_k_m")), out_);
  ConvertOptions plain = llama_options("f32");
  convert(planned(plain), folder_ / "plain.gguf");
  ConvertOptions second = llama_options("q4_k_m");
  second.metadata.clear();
  const auto middle = open_checkpoint(folder_ / "plain.gguf");
  convert(make_conversion(middle, second), folder_ / "second.gguf");
  const auto one = open_checkpoint(out_);
  const auto two = open_checkpoint(folder_ / "second.gguf");
  for (const TensorInfo& tensor : one->tensors()) {
    if (tensor.encoding.is_dtype()) continue;
    const TensorInfo& other = two->tensors().at(two->find(tensor.name).value());
    EXPECT_EQ(other.encoding, tensor.encoding) << tensor.name;
    EXPECT_TRUE(read_file(out_).substr(tensor.offset_begin, tensor.byte_count()) ==
                read_file(folder_ / "second.gguf").substr(other.offset_begin, other.byte_count()))
        << tensor.name;
  }
}

TEST_F(GgufQuantize, BlocksOfTheTypeStayAndOthersAreRoundedOnceMore) {
  convert(planned(llama_options("q4_k_m")), out_);
  ConvertOptions again = llama_options("q4_k_m");
  again.metadata.clear();
  const auto blocks = open_checkpoint(out_);
  const Conversion same = make_conversion(blocks, again);
  EXPECT_THAT(codes_of(same), Not(Contains("convert.requantized")));
  convert(same, folder_ / "same.gguf");
  EXPECT_TRUE(read_file(folder_ / "same.gguf") == read_file(out_));
  again.quantize.formats = llama_options("q8_0").quantize.formats;
  const Conversion other = make_conversion(blocks, again);
  EXPECT_THAT(codes_of(other), Contains("convert.requantized"));
  EXPECT_THAT(other.plan.findings,
              Contains(Field(&Finding::message,
                             HasSubstr(" tensors are already quantized to Q4_K and are "))));
  convert(other, folder_ / "other.gguf");
  EXPECT_THAT(types_in(folder_ / "other.gguf"), Contains("blk.0.attn_q.weight Q8_0"));
  EXPECT_TRUE(compare(*blocks, *open_checkpoint(folder_ / "other.gguf")).ok());
}

TEST_F(GgufQuantize, WhatDoesNotGoTogetherIsRefused) {
  const auto parse = [](const char* text, FileFormat format) {
    return code_of([&] { (void)parse_quantization(text, QuantizeMode::exact, format); });
  };
  EXPECT_EQ(parse("q4_k_m", FileFormat::gguf), "");
  EXPECT_EQ(parse("q4_k_m", FileFormat::safetensors), "plan.options");
  EXPECT_EQ(parse("q9_k_m", FileFormat::gguf), "plan.options");
  EXPECT_EQ(
      code_of([] { (void)parse_quantization("q4_k_m", QuantizeMode::compat, FileFormat::gguf); }),
      "plan.options");
  const auto refused = [&](const ConvertOptions& options) {
    return code_of([&] { (void)planned(options); });
  };
  ConvertOptions options = llama_options("q8_0");
  EXPECT_EQ(refused(options), "");
  options.format = FileFormat::safetensors;
  EXPECT_EQ(refused(options), "plan.options");
  options = llama_options("none");
  options.quantize.formats.front().quantization.encoding = "nvfp4";
  EXPECT_EQ(refused(options), "plan.options");
  options = llama_options("q8_0");
  options.quantize.style = QuantizeStyle::compressed_tensors;
  EXPECT_EQ(refused(options), "plan.options");
  options = llama_options("q8_0");
  options.quantize.formats.insert(options.quantize.formats.begin(), format_for("up", "q4_k_m"));
  EXPECT_EQ(refused(options), "plan.options");  // a mix cannot be combined with patterns
  options = llama_options("q4_k_m");
  options.metadata.erase("llama.block_count");
  EXPECT_EQ(refused(options), "plan.options");
}

std::string image_file() {
  const auto tensor = [](const char* name, std::vector<std::uint64_t> shape, unsigned seed) {
    std::uint64_t count = 1;
    for (const std::uint64_t extent : shape) count *= extent;
    return FileTensor{name, "BF16", std::move(shape), numbers(count, seed)};
  };
  return safetensors_bytes({tensor("blocks.0.self_attn.q.weight", {64, 256}, 1),
                            tensor("blocks.0.self_attn.v.weight", {64, 256}, 2),
                            tensor("blocks.0.norm.weight", {256}, 3),
                            tensor("patch_embedding.weight", {512, 4, 1, 2, 2}, 4),
                            tensor("head.head.weight", {64, 256}, 5),
                            {"blocks.0.modulation", "F32", {1, 6, 4}, some_bytes(96, 6)}});
}

std::vector<std::string> types_of_image(const char* architecture, const char* format) {
  const TemporaryFolder folder;
  const std::string source = folder.write("source.safetensors", image_file());
  ConvertOptions options = llama_options(format);
  options.metadata = {{"general.architecture", {.value = architecture}}};
  options.beyond_ggml = true;
  convert(make_conversion(open_checkpoint(source), options), folder / "out.gguf");
  std::vector<std::string> types;
  const auto after = open_checkpoint(folder / "out.gguf");
  for (const TensorInfo& tensor : after->tensors()) {
    types.push_back(tensor.name + " " + std::string(tensor.encoding.name()));
  }
  return types;
}

TEST(GgufQuantizeImages, AMixGivesComfysTypes) {
  EXPECT_THAT(types_of_image("wan", "q4_k_m"),
              ElementsAre("blocks.0.self_attn.q.weight Q4_K", "blocks.0.self_attn.v.weight Q6_K",
                          "blocks.0.norm.weight F32", "patch_embedding.weight F32",
                          "head.head.weight BF16", "blocks.0.modulation F32"));
}

// For unknown image models, loadstone assigns types without mixes.
TEST(GgufQuantizeImages, AnotherModelHasPlainTypes) {
  EXPECT_THAT(types_of_image("another", "q8_0"),
              ElementsAre("blocks.0.self_attn.q.weight Q8_0", "blocks.0.self_attn.v.weight Q8_0",
                          "blocks.0.norm.weight BF16", "patch_embedding.weight BF16",
                          "head.head.weight BF16", "blocks.0.modulation F32"));
  EXPECT_EQ(code_of([] { types_of_image("another", "q4_k_m"); }), "plan.options");
}

// ---- importance matrices

std::shared_ptr<const std::vector<float>> rising(std::size_t count, float begin = 0.5f) {
  std::vector<float> numbers(count);
  for (std::size_t i = 0; i < count; ++i) numbers[i] = begin + static_cast<float>(i * i % 97);
  return std::make_shared<const std::vector<float>>(std::move(numbers));
}

ImportanceMatrix llama_importance() {
  ImportanceMatrix matrix;
  matrix.path = std::string(200, 'p');
  matrix.dataset = "wiki.txt";
  matrix.chunks = 7;
  for (const char* const name : {"blk.0.attn_q", "blk.0.attn_v", "blk.0.ffn_up", "blk.1.attn_v"}) {
    matrix.entries[std::string(name) + ".weight"] = rising(256);
  }
  matrix.entries["blk.0.ffn_down.weight"] = rising(96);
  matrix.entries["blk.0.odd.weight"] = rising(40);
  return matrix;
}

ConvertOptions weighed_options(const std::string& format, ImportanceMatrix matrix) {
  ConvertOptions options = llama_options(format);
  options.quantize.importance = std::make_shared<const ImportanceMatrix>(std::move(matrix));
  return options;
}

std::string data_of(const std::string& path, const std::string& name) {
  const auto catalog = open_checkpoint(path);
  const TensorInfo& tensor = catalog->tensors().at(catalog->find(name).value());
  return read_file(path).substr(tensor.offset_begin, tensor.byte_count());
}

TEST_F(GgufQuantize, EntriesWeighTheTensorsOfTheirNames) {
  convert(planned(llama_options("q4_k_m")), folder_ / "plain.gguf");
  ImportanceMatrix matrix = llama_importance();
  matrix.entries.erase("blk.0.attn_v.weight");
  const Conversion conversion = planned(weighed_options("q4_k_m", matrix));
  EXPECT_THAT(codes_of(conversion), ElementsAre("convert.fallback", "convert.fallback",
                                                "convert.importance", "plan.cast", "plan.cast"));
  EXPECT_THAT(conversion.plan.findings[2].message, HasSubstr("token_embd.weight' and 1 other"));
  convert(conversion, out_);
  EXPECT_EQ(types_in(out_), types_in(folder_ / "plain.gguf"));
  std::vector<std::string> changed;
  const auto after = open_checkpoint(out_);
  for (const TensorInfo& tensor : after->tensors()) {
    if (data_of(out_, tensor.name) == data_of(folder_ / "plain.gguf", tensor.name)) continue;
    changed.push_back(tensor.name);
  }
  EXPECT_THAT(changed, ElementsAre("blk.0.attn_q.weight", "blk.0.ffn_up.weight",
                                   "blk.0.ffn_down.weight", "blk.1.attn_v.weight"));
}

TEST_F(GgufQuantize, KeysAreThoseOfLlamaQuantize) {
  const auto keys_with = [&](const ImportanceMatrix& matrix) {
    Metadata keys;
    for (const auto& [key, item] : planned(weighed_options("q8_0", matrix)).metadata) {
      if (key.starts_with("quantize.")) keys.emplace(key, item);
    }
    return keys;
  };
  ImportanceMatrix matrix = llama_importance();
  Metadata keys = keys_with(matrix);
  EXPECT_EQ(keys.size(), 4u);
  EXPECT_EQ(std::get<std::string>(keys.at("quantize.imatrix.file").value), std::string(127, 'p'));
  EXPECT_EQ(std::get<std::string>(keys.at("quantize.imatrix.dataset").value), "wiki.txt");
  EXPECT_EQ(std::get<std::uint64_t>(keys.at("quantize.imatrix.entries_count").value), 6u);
  EXPECT_EQ(std::get<std::uint64_t>(keys.at("quantize.imatrix.chunks_count").value), 7u);
  EXPECT_EQ(keys.at("quantize.imatrix.chunks_count").type, MetadataType::u32);
  matrix.chunks = 0;
  matrix.dataset.reset();
  EXPECT_EQ(keys_with(matrix).size(), 2u);
  EXPECT_FALSE(planned(llama_options("q8_0")).metadata.contains("quantize.imatrix.file"));
}

// Some rules of mixes depend only on whether there is an importance matrix, not on its entries.
TEST_F(GgufQuantize, TypesDependOnWhetherThereIsAnImportance) {
  ConvertOptions options = weighed_options("q4_0", llama_importance());
  options.metadata["llama.block_count"] = number(8);
  EXPECT_THAT(types_with(options), Contains("blk.0.ffn_down.weight Q4_1"));
  options.quantize.importance = nullptr;
  EXPECT_THAT(types_with(options), Contains("blk.0.ffn_down.weight Q4_0"));
}

TEST_F(GgufQuantize, EntriesThatFitNoTensorAreTold) {
  const auto found = [&](const ImportanceMatrix& matrix) {
    std::vector<Finding> all = planned(weighed_options("q4_k_m", matrix)).plan.findings;
    std::erase_if(all, [](const Finding& each) {
      return each.code != "convert.importance" || each.severity == Severity::info;
    });
    return all;
  };
  ImportanceMatrix matrix = llama_importance();
  EXPECT_THAT(found(matrix), ElementsAre());
  // The embedding and the norm need no importance: imatrix does not measure lookups, and norms are
  // not quantized.
  matrix.entries["token_embd.weight"] = rising(24);
  matrix.entries["output_norm.weight"] = rising(3);
  EXPECT_THAT(found(matrix), ElementsAre());
  matrix.entries["blk.9.attn_q.weight"] = rising(256);
  ASSERT_EQ(found(matrix).size(), 1u);
  EXPECT_EQ(found(matrix)[0].severity, Severity::warning);
  EXPECT_THAT(found(matrix)[0].message, HasSubstr("1 of 9 entries"));
  EXPECT_THAT(found(matrix)[0].message, HasSubstr("blk.9.attn_q.weight"));
  matrix = llama_importance();
  matrix.entries["blk.0.attn_q.weight"] = rising(255);
  ASSERT_EQ(found(matrix).size(), 1u);
  EXPECT_EQ(found(matrix)[0].severity, Severity::error);
  EXPECT_EQ(found(matrix)[0].target, "blk.0.attn_q.weight");
  EXPECT_EQ(found(matrix)[0].found, "255");
  EXPECT_EQ(found(matrix)[0].expected, "256 columns");
}

TEST_F(GgufQuantize, BlocksOfTheFewestBitsNeedAnImportance) {
  const auto needing = [&](const ConvertOptions& options) {
    for (const Finding& each : planned(options).plan.findings) {
      if (each.severity == Severity::error) return each.code + ": " + each.message;
    }
    return std::string();
  };
  EXPECT_THAT(
      needing(llama_options("q2_k_s")),
      HasSubstr(
          "convert.importance: 'blk.0.attn_q.weight' and 3 others would be quantized to Q2_K"));
  EXPECT_EQ(needing(llama_options("q2_k")), "");  // same blocks in a different mix
  EXPECT_EQ(needing(weighed_options("q2_k_s", llama_importance())), "");
  ImportanceMatrix matrix = llama_importance();
  matrix.entries.erase("blk.0.ffn_up.weight");
  EXPECT_THAT(needing(weighed_options("q2_k_s", matrix)),
              HasSubstr("'blk.0.ffn_up.weight' would be quantized to Q2_K"));
  const auto error = error_of([&] { convert(planned(llama_options("q2_k_s")), out_); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), "convert.importance");
  EXPECT_FALSE(std::filesystem::exists(out_));
}

TEST_F(GgufQuantize, AnImportanceIsForBlocksOnly) {
  const auto refused = [&](const ConvertOptions& options) {
    return code_of([&] { (void)planned(options); });
  };
  ConvertOptions options = weighed_options("q4_k_m", llama_importance());
  EXPECT_EQ(refused(options), "");
  options.quantize.formats.clear();
  EXPECT_EQ(refused(options), "plan.options");
  options = ConvertOptions{};
  options.quantize.formats = {{.pattern = {}, .quantization = parse_quantization("nf4")}};
  EXPECT_EQ(refused(options), "");
  options.quantize.importance = std::make_shared<const ImportanceMatrix>(llama_importance());
  EXPECT_EQ(refused(options), "plan.options");
}

TEST_F(GgufQuantize, PartsOfOneOutputHaveOneImportance) {
  const auto part = [&](const ImportanceMatrix& matrix, std::uint32_t index) {
    ConvertOptions options = weighed_options("q4_k_m", matrix);
    options.one_file = false;
    options.is_split = true;
    options.stem = "out";
    options.shard_bytes_max = 20'000;
    return code_of([&] { convert(planned(options), out_, {.part = ConvertPart{index, 2}}); });
  };
  ImportanceMatrix other = llama_importance();
  other.entries["blk.0.attn_q.weight"] = rising(256, 0.75f);
  EXPECT_EQ(part(llama_importance(), 1), "");
  EXPECT_EQ(part(other, 2), "convert.state");
  EXPECT_EQ(part(llama_importance(), 2), "");
}

}  // namespace

}  // namespace loadstone::test
