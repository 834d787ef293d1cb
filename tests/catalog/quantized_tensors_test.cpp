#include "loadstone/quantized_tensors.h"

#include <gmock/gmock.h>

#include <limits>
#include <span>
#include <string>
#include <vector>

#include "kernels/bnb.h"
#include "loadstone/convert.h"
#include "loadstone/execute.h"
#include "loadstone/verify.h"
#include "support/files.h"
#include "support/memory_storage.h"
#include "support/watched_storage.h"

namespace loadstone::test {
namespace {

using namespace ::testing;

FileTensor tensor(const std::string& name, const std::string& dtype,
                  const std::vector<std::uint64_t>& shape, std::uint64_t bytes_each) {
  std::uint64_t bytes = bytes_each;
  for (const std::uint64_t extent : shape) bytes *= extent;
  return {name, dtype, shape, some_bytes(bytes)};
}

FileTensor text_tensor(const std::string& name, const std::string& text) {
  return {name, "U8", {text.size()}, text};
}

FileTensor table(const std::string& name, std::span<const float> values) {
  return {name, "F32", {values.size()}, raw_all(std::vector<float>(values.begin(), values.end()))};
}

class QuantizedTensorsTest : public ::testing::Test {
 protected:
  QuantizedTensors find(const std::vector<FileTensor>& tensors) {
    catalog_ = open_checkpoint(folder_.write("file.safetensors", safetensors_bytes(tensors)));
    return find_quantized_tensors(*catalog_);
  }
  // Returns one string "name: encoding, codec" for each quantized tensor.
  static std::vector<std::string> lines(const QuantizedTensors& found) {
    std::vector<std::string> lines;
    for (const QuantizedTensor& value : found.tensors()) {
      if (!value.is_readable()) continue;
      lines.push_back(value.name + ": " + value.encoding + ", " + value.decoding.kernel);
    }
    return lines;
  }

  TemporaryFolder folder_;
  std::shared_ptr<const Catalog> catalog_;
};

std::string state(const std::string& more = "") {
  return R"({"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [8, 32])" + more +
         "}";
}

const std::string nested = R"(, "nested_blocksize": 256, "nested_dtype": "float32",)"
                           R"( "nested_offset": 0.25)";

// loadstone must not decode a quantized tensor that has unknown companion tensors, because they
// change the meaning of the codes.
TEST_F(QuantizedTensorsTest, WhatIsNotUnderstoodIsRefused) {
  const FileTensor codes = tensor("a.weight", "F8_E4M3", {8, 64}, 1);
  const FileTensor scale = tensor("a.weight_scale", "F32", {8, 1}, 4);
  const FileTensor bytes = tensor("a.weight", "I8", {8, 64}, 1);
  const std::string rotated = R"({"format": "int8_tensorwise", "convrot": true})";
  const FileTensor packed = tensor("a.weight", "U8", {8, 32}, 1);
  const FileTensor packed_scale = tensor("a.weight_scale", "F8_E4M3", {8, 4}, 1);
  const FileTensor global = tensor("a.weight_scale_2", "F32", {}, 4);
  EXPECT_THAT(find({codes, scale}).findings(), IsEmpty());
  EXPECT_THAT(find({packed, packed_scale, global}).findings(), IsEmpty());
  const std::vector<std::vector<FileTensor>> cases = {
      {bytes, scale, tensor("a.weight_g_idx", "I32", {64}, 4)},
      {codes, scale, tensor("a.weight_zero_point", "I8", {8, 1}, 1)},
      {codes, scale, tensor("a.weight_g_idx", "I32", {64}, 4)},
      {codes, scale, tensor("a.pre_quant_scale", "BF16", {64}, 2)},
      {codes, scale, tensor("a.weight_scale_inv", "F32", {8, 1}, 4)},
      {codes, scale, tensor("a.other_scale", "F32", {}, 4)},
      {bytes, scale, tensor("a.weight_offset", "F32", {8, 1}, 4)},
      {packed, packed_scale, global, tensor("a.pre_quant_scale", "F32", {64}, 4)},
      {packed, packed_scale, global, text_tensor("a.comfy_quant", "{}")},
      {codes, scale, text_tensor("a.comfy_quant", R"({"format": "mxfp7"})")},
      {bytes, scale, text_tensor("a.comfy_quant", rotated)},
      {tensor("a.weight", "U32", {8, 8}, 4), tensor("a.scales", "BF16", {8, 1}, 2),
       tensor("a.biases", "BF16", {8, 1}, 2)},
      {tensor("a.W_q", "U8", {8, 8}, 1), tensor("a.scale", "F16", {8, 1}, 2)},
      {codes, tensor("a.weight_s", "F32", {8, 1}, 4)},
      {codes, tensor("a.qscale", "F32", {}, 4)},
      {codes, tensor("a.quantizer.scale", "F32", {}, 4)},
      {tensor("a.weight._data", "I8", {8, 64}, 1), tensor("a.weight._scale", "F32", {8, 1}, 4)},
  };
  for (const auto& tensors : cases) {
    const QuantizedTensors found = find(tensors);
    EXPECT_FALSE(found.has_readable()) << tensors.back().name;
    EXPECT_THAT(found.findings(), ElementsAre(Field(&Finding::code, "plan.encoding")))
        << tensors.back().name;
  }
}

TEST_F(QuantizedTensorsTest, ATileOfAnOldGpuIsRefused) {
  for (const char format : {'\0', '\1', '\3', 'M'}) {
    const QuantizedTensors found = find({tensor("a.weight", "I8", {8, 64}, 1),
                                         tensor("a.SCB", "F32", {8}, 4),
                                         {"a.weight_format", "U8", {}, std::string(1, format)}});
    if (format == '\0') {
      EXPECT_THAT(found.findings(), IsEmpty());
      continue;
    }
    EXPECT_THAT(found.findings(), ElementsAre(Field(&Finding::code, "q.weight_format")));
  }
}

// A weight with 192 rows may have two blocks of 96 rows, or one of 128 rows and a shorter block.
// Only the config decides.
TEST_F(QuantizedTensorsTest, ConfigsTellTheSizeOfBlocks) {
  struct Case {
    const char* config;
    const char* kernel;  // expected codec or error code
  };
  const Case cases[] = {
      {"", "fp8_block_128"},
      {R"({"quantization_config": {"weight_block_size": [128, 128]}})", "fp8_block_128"},
      {R"({"quantization_config": {"weight_block_size": [96, 96]}})", "fp8_block"},
      {R"({"limit": Infinity, "text_config": {"quantization_config":
          {"weight_block_size": [96, 96]}}})",
       "fp8_block"},
      {R"({"quantization_config": {"config_groups": {"group_0": {"weights":
          {"block_structure": [96, 96]}}}}})",
       "fp8_block"},
      {R"({"quantization_config": {"config_groups": {"group_0": {"weights":
          {"block_structure": "96x96"}}}}})",
       "fp8_block"},
      {R"({"quantization_config": {"weight_block_size": [64, 64]}})", "q.scale_shape"},
      {R"({"quantization_config": {"weight_block_size": [100, 100]}})", "plan.encoding"},
      {R"({"quantization_config": {"weight_block_size": "large"}})", "plan.encoding"},
      {R"({"quantization_config": {"weight_block_size": [96, 96], "config_groups": {"group_0":
          {"weights": {"block_structure": [128, 128]}}}}})",
       "plan.encoding"},
  };
  for (const auto& [config, kernel] : cases) {
    folder_.write("config.json", *config == '\0' ? "{}" : config);
    const QuantizedTensors found = find({tensor("a.weight", "F8_E4M3", {192, 192}, 1),
                                         tensor("a.weight_scale_inv", "F32", {2, 2}, 4)});
    if (!found.has_readable()) {
      EXPECT_THAT(found.findings(), ElementsAre(Field(&Finding::code, kernel))) << config;
    } else {
      EXPECT_EQ(found.tensors().front().decoding.kernel, kernel) << config;
    }
  }
}

TEST_F(QuantizedTensorsTest, EveryLayoutIsKnownByItsNamesAndShapes) {
  const QuantizedTensors found = find({
      tensor("a.weight", "F8_E4M3", {200, 300}, 1),
      tensor("a.weight_scale_inv", "F32", {2, 3}, 4),
      tensor("b.weight", "F8_E4M3", {8, 16}, 1),
      tensor("b.weight_scale", "F32", {}, 4),
      tensor("b.input_scale", "F32", {}, 4),
      tensor("c.weight", "F8_E4M3", {8, 8}, 1),
      tensor("c.weight_scale", "BF16", {8}, 2),
      tensor("d.weight", "U8", {8, 16}, 1),
      tensor("d.weight_scale", "F8_E4M3", {8, 2}, 1),
      tensor("d.weight_scale_2", "F32", {}, 4),
      tensor("e.weight_packed", "U8", {8, 16}, 1),
      tensor("e.weight_scale", "F8_E4M3", {8, 2}, 1),
      tensor("e.weight_global_scale", "F32", {1}, 4),
      tensor("f.weight", "U8", {8, 16}, 1),
      tensor("f.weight_scale", "U8", {8, 1}, 1),
      tensor("g.weight", "F8_E4M3", {8, 64}, 1),
      tensor("g.weight_scale", "U8", {8, 2}, 1),
      tensor("h_blocks", "U8", {2, 4, 2, 16}, 1),
      tensor("h_scales", "U8", {2, 4, 2}, 1),
      tensor("i.weight", "I8", {8, 16}, 1),
      tensor("i.SCB", "F32", {8}, 4),
      {"i.weight_format", "U8", {}, std::string(1, '\0')},
      tensor("j.weight", "I8", {8, 16}, 1),
      tensor("j.weight_scale", "BF16", {8, 1}, 2),
      tensor("k.weight", "U8", {128, 1}, 1),
      tensor("k.weight.absmax", "F32", {4}, 4),
      table("k.weight.quant_map", bnb4_values(Bnb4Code::nf4)),
      text_tensor("k.weight.quant_state.bitsandbytes__nf4", state()),
      tensor("l.weight", "U8", {128, 1}, 1),
      tensor("l.weight.absmax", "U8", {4}, 1),
      tensor("l.weight.nested_absmax", "F32", {1}, 4),
      table("l.weight.nested_quant_map", bnb_dynamic_map()),
      text_tensor("l.weight.quant_state.bitsandbytes__nf4", state(nested)),
      tensor("plain.weight", "BF16", {8, 16}, 2),
      tensor("mask", "U8", {8, 16}, 1),
  });
  EXPECT_THAT(found.findings(), IsEmpty());
  EXPECT_THAT(lines(found),
              ElementsAre("a.weight: fp8-block, fp8_block_128", "b.weight: fp8, fp8_block",
                          "c.weight: fp8-channel, fp8_rows", "d.weight: nvfp4, nvfp4",
                          "e.weight: nvfp4, nvfp4_divided", "f.weight: mxfp4, fp4_block",
                          "g.weight: mxfp8, mxfp8", "h: mxfp4, mxfp4", "i.weight: int8, bnb_int8",
                          "j.weight: int8-channel, int8_rows", "k.weight: nf4, bnb_nf4",
                          "l.weight: nf4, bnb_nf4"));
  EXPECT_EQ(found.tensors()[7].decoding.shape, Shape({2, 4, 64}));
  EXPECT_EQ(found.tensors()[10].decoding.dtype, Dtype::f16);
  EXPECT_EQ(found.tensors()[11].decoding.offset, 0.25f);
  EXPECT_THAT(found.tensors()[1].unneeded, ElementsAre(*catalog_->find("b.input_scale")));
  EXPECT_THAT(found.tensors()[8].unneeded, ElementsAre(*catalog_->find("i.weight_format")));
  EXPECT_THAT(found.tensors()[10].unneeded, SizeIs(2));
}

TEST_F(QuantizedTensorsTest, LayoutsOfEnginesAreKnownByNamesMarkersAndShapes) {
  const QuantizedTensors found = find({
      tensor("m.weight", "I8", {8, 32}, 1),
      tensor("m.scale", "F8_E8M0", {8, 2}, 1),
      tensor("n.weight", "F8_E4M3", {200, 300}, 1),
      tensor("n.scale", "F8_E8M0", {2, 3}, 1),
      tensor("o.weight", "U8", {16, 16}, 1),
      tensor("o.weight_scale", "F8_E4M3", {128, 4}, 1),
      tensor("o.weight_scale_2", "F32", {}, 4),
      text_tensor("o.comfy_quant", R"({"format": "nvfp4"})"),
      tensor("p.weight", "F8_E4M3", {32, 64}, 1),
      tensor("p.weight_scale", "U8", {128, 4}, 1),
      text_tensor("p.comfy_quant", R"({"format": "mxfp8"})"),
      tensor("q.weight", "F8_E5M2", {8, 16}, 1),
      tensor("q.scale_weight", "F32", {1}, 4),
      tensor("r.weight", "U32", {8, 10}, 4),
      tensor("r.scales", "BF16", {8, 1}, 2),
      tensor("r.biases", "BF16", {8, 1}, 2),
      tensor("s.weight", "U32", {8, 8}, 4),
      tensor("s.scales", "U8", {8, 4}, 1),
  });
  EXPECT_THAT(found.findings(), IsEmpty());
  EXPECT_THAT(lines(found),
              ElementsAre("m.weight: mxfp4, fp4_block", "n.weight: fp8-block, fp8_block_128",
                          "o.weight: nvfp4-comfyui, comfy_nvfp4",
                          "p.weight: mxfp8-comfyui, comfy_mxfp8", "q.weight: fp8, fp8_block",
                          "r.weight: mlx-affine, mlx_affine", "s.weight: nvfp4-mlx, mlx_nvfp4"));
}

TEST_F(QuantizedTensorsTest, CompanionsGoWithTheNearestCodes) {
  const std::string marker = R"({"format": "float8_e4m3fn", "full_precision_matrix_mult": true})";
  const QuantizedTensors found = find({
      tensor("scaled_fp8", "F8_E4M3", {2}, 1), tensor("a.attn.k_scale", "F32", {}, 4),
      tensor("a.attn.v_scale", "F32", {8}, 4),  // may be learned, so it is kept
      tensor("a.attn.q.weight", "F8_E4M3", {8, 16}, 1),
      tensor("a.attn.q.weight_scale", "F32", {}, 4), text_tensor("a.attn.q.comfy_quant", marker),
      tensor("a.attn.other_scale", "F32", {}, 4), tensor("b.up", "F8_E4M3", {2, 8, 16}, 1),
      tensor("b.up_scale", "F32", {2, 1, 1}, 4), tensor("b.up_input_scale", "F32", {}, 4),
      tensor("b.k_scale", "F32", {}, 4), tensor("c.input_scale", "F32", {}, 4),  // no data
  });
  ASSERT_THAT(found.tensors(), SizeIs(2));
  const auto names = [&](const std::vector<std::uint32_t>& indices) {
    std::vector<std::string> all;
    for (const std::uint32_t index : indices) all.push_back(catalog_->tensors()[index].name);
    std::ranges::sort(all);
    return all;
  };
  EXPECT_THAT(names(found.tensors()[0].unneeded),
              ElementsAre("a.attn.k_scale", "a.attn.q.comfy_quant", "scaled_fp8"));
  EXPECT_THAT(names(found.tensors()[1].unneeded), ElementsAre("b.k_scale", "b.up_input_scale"));
  for (const char* name : {"a.attn.v_scale", "a.attn.q.weight_scale", "b.up_scale"}) {
    EXPECT_TRUE(found.is_companion(*catalog_->find(name))) << name;
  }
  for (const char* name : {"a.attn.other_scale", "c.input_scale", "b.up"}) {
    EXPECT_FALSE(found.is_companion(*catalog_->find(name))) << name;
  }
}

TEST_F(QuantizedTensorsTest, WhatIsBrokenIsNamed) {
  const auto expect = [&](const std::vector<FileTensor>& tensors, const std::string& code,
                          const std::string& culprit) {
    const QuantizedTensors found = find(tensors);
    EXPECT_FALSE(found.has_readable()) << culprit;
    EXPECT_THAT(found.findings(), ElementsAre(AllOf(Field(&Finding::severity, Severity::error),
                                                    Field(&Finding::code, code),
                                                    Field(&Finding::message, HasSubstr(culprit)))))
        << culprit;
  };
  const FileTensor fp8 = tensor("a.weight", "F8_E4M3", {200, 300}, 1);
  expect({fp8, tensor("a.weight_scale_inv", "F32", {7, 11}, 4)}, "q.scale_shape", "a.weight");
  expect({fp8, tensor("a.weight_scale_inv", "F32", {4, 5}, 4)}, "q.scale_shape", "a.weight");
  expect({tensor("f.weight", "U8", {8, 48}, 1), tensor("f.weight_scale", "U8", {8, 2}, 1)},
         "q.scale_shape", "f.weight");
  const FileTensor nibbles = tensor("d.weight", "U8", {8, 16}, 1);
  const FileTensor scales = tensor("d.weight_scale", "F8_E4M3", {8, 2}, 1);
  expect({nibbles, scales}, "q.scale_missing", "d.weight_scale_2");
  expect({nibbles, tensor("d.weight_scale", "F8_E4M3", {8, 3}, 1),
          tensor("d.weight_scale_2", "F32", {}, 4)},
         "q.scale_shape", "d.weight");
  expect({tensor("e.weight_packed", "U8", {8, 16}, 1)}, "q.scale_missing", "e.weight_scale");
  expect({tensor("h_blocks", "U8", {4, 2, 16}, 1)}, "q.scale_missing", "h_scales");
  expect({tensor("h_blocks", "U8", {4, 2, 15}, 1), tensor("h_scales", "U8", {4, 2}, 1)}, "q.block",
         "h_blocks");
  const FileTensor packed = tensor("k.weight", "U8", {128, 1}, 1);
  const std::string name = "k.weight.quant_state.bitsandbytes__nf4";
  expect({packed, text_tensor(name, state())}, "q.scale_missing", "k.weight.absmax");
  const FileTensor absmax = tensor("k.weight.absmax", "F32", {4}, 4);
  expect({packed, absmax, text_tensor(name, "{no")}, "q.quant_state", name);
  expect({packed, absmax, text_tensor(name, std::string(5000, ' '))}, "q.quant_state", name);
  expect({packed, absmax, text_tensor("k.weight.quant_state.bitsandbytes__fp4", state())},
         "q.quant_state", "bitsandbytes__fp4");
  std::string other = state();
  other.replace(other.find("64"), 2, "65");
  expect({packed, absmax, text_tensor(name, other)}, "q.group_size", name);
  other = state();
  other.replace(other.find("[8"), 2, "[9");
  expect({packed, absmax, text_tensor(name, other)}, "q.shape", "k.weight");
  const FileTensor short_absmax = tensor("k.weight.absmax", "F32", {2}, 4);
  expect({packed, short_absmax, text_tensor(name, state())}, "q.scale_shape", "k.weight.absmax");
  expect({packed}, "q.scale_missing", "k.weight.quant_state");
}

// Only a config can show that FP8 data once had scales.
TEST_F(QuantizedTensorsTest, Fp8WithoutScalesAreNumbersUnlessAConfigSaysOtherwise) {
  const std::vector<FileTensor> tensors = {tensor("a.weight", "F8_E4M3", {200, 300}, 1)};
  const auto codes = [&] {
    std::vector<std::string> listed;
    const QuantizedTensors found = find(tensors);
    EXPECT_FALSE(found.has_readable());
    for (const Finding& finding : found.findings()) listed.push_back(finding.code);
    return listed;
  };
  EXPECT_THAT(codes(), IsEmpty());
  folder_.write("config.json", R"({"model_type": "llama", "quantization_config": null})");
  EXPECT_THAT(codes(), IsEmpty());
  for (const char* config : {R"({"quantization_config": {"quant_method": "fp8"}})",
                             R"({"text_config": {"quantization_config": {}}})"}) {
    folder_.write("config.json", config);
    EXPECT_THAT(codes(), ElementsAre("q.scale_missing")) << config;
  }
  folder_.write("config.json", "{}");
  folder_.write("hf_quant_config.json", R"({"quantization": {"quant_algo": "FP8"}})");
  EXPECT_THAT(codes(), ElementsAre("q.scale_missing"));
}

TEST_F(QuantizedTensorsTest, LayoutsThatAreNotDecodedAreNamed) {
  const FileTensor data = tensor("a.weight", "F8_E4M3", {16, 16}, 1);
  for (const char* scale : {"a.scale", "a.qscale_weight", "a.weight.scale"}) {
    const QuantizedTensors found = find({data, tensor(scale, "F32", {}, 4)});
    EXPECT_FALSE(found.has_readable()) << scale;
    EXPECT_THAT(found.findings(), ElementsAre(AllOf(Field(&Finding::code, "plan.encoding"),
                                                    Field(&Finding::message, HasSubstr(scale)))));
  }
}

TEST_F(QuantizedTensorsTest, TwoStatesOfOneWeightAreRefused) {
  std::string fp4 = state();
  fp4.replace(fp4.find("nf4"), 3, "fp4");
  const QuantizedTensors found = find({
      tensor("k.weight", "U8", {128, 1}, 1),
      tensor("k.weight.absmax", "F32", {4}, 4),
      text_tensor("k.weight.quant_state.bitsandbytes__nf4", state()),
      text_tensor("k.weight.quant_state.bitsandbytes__fp4", fp4),
  });
  EXPECT_FALSE(found.has_readable());
  EXPECT_THAT(found.findings(),
              ElementsAre(AllOf(Field(&Finding::code, "q.quant_state"),
                                Field(&Finding::message, HasSubstr("bitsandbytes__fp4")))));
}

TEST_F(QuantizedTensorsTest, TablesOfCodesAreThoseOfTheEncoding) {
  const auto codes = [&](std::span<const float> map, std::span<const float> nested_map,
                         const std::string& said = nested) {
    std::vector<std::string> listed;
    const QuantizedTensors found = find({
        tensor("k.weight", "U8", {128, 1}, 1),
        tensor("k.weight.absmax", "U8", {4}, 1),
        tensor("k.weight.nested_absmax", "F32", {1}, 4),
        table("k.weight.quant_map", map),
        table("k.weight.nested_quant_map", nested_map),
        text_tensor("k.weight.quant_state.bitsandbytes__nf4", state(said)),
    });
    for (const Finding& finding : found.findings()) listed.push_back(finding.code);
    return listed;
  };
  const auto own = bnb4_values(Bnb4Code::nf4);
  const auto nested_own = bnb_dynamic_map();
  EXPECT_THAT(codes(own, nested_own), IsEmpty());
  EXPECT_THAT(codes(bnb4_values(Bnb4Code::fp4), nested_own), ElementsAre("q.code"));
  EXPECT_THAT(codes(std::vector<float>(16), nested_own), ElementsAre("q.code"));
  EXPECT_THAT(codes(std::vector<float>(17), nested_own), ElementsAre("q.scale_shape"));
  EXPECT_THAT(codes(own, std::vector<float>(256)), ElementsAre("q.code"));
  std::vector<float> not_finite(nested_own.begin(), nested_own.end());
  not_finite[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(codes(own, not_finite), ElementsAre("q.nan"));
  std::string beyond = nested;
  beyond.replace(beyond.find("0.25"), 4, "1e39");
  EXPECT_THAT(codes(own, nested_own, beyond), ElementsAre("q.quant_state"));
}

// ModelOpt adds dimensions of 1 to the shape of block scales.
TEST_F(QuantizedTensorsTest, ScalesOfBlocksMayHaveAxesOfOne) {
  const FileTensor weight = tensor("a.weight", "F8_E4M3", {200, 300}, 1);
  const QuantizedTensors found = find({weight, tensor("a.weight_scale", "F32", {2, 1, 3, 1}, 4)});
  EXPECT_THAT(lines(found), ElementsAre("a.weight: fp8-block, fp8_block_128"));
  EXPECT_THAT(find({weight, tensor("a.weight_scale", "F32", {2, 3, 1, 1}, 4)}).findings(),
              ElementsAre(Field(&Finding::code, "q.scale_shape")));
}

TEST_F(QuantizedTensorsTest, AScaleOfNothingIsAWarning) {
  const QuantizedTensors found =
      find({tensor("a.weight", "BF16", {8, 8}, 2), tensor("a.weight_scale_inv", "F32", {1, 1}, 4)});
  EXPECT_THAT(found.findings(), ElementsAre(Field(&Finding::code, "q.scale_unused")));
  EXPECT_EQ(found.findings()[0].severity, Severity::warning);
}

// ---- catalogs that were opened through a caller's storage

// The files exist only in the caller's storage, which the catalog must use for later reads.
TEST_F(QuantizedTensorsTest, ACatalogIsReadThroughItsStorage) {
  MemoryStorage storage;
  storage.add_file(
      "/nowhere/file.safetensors",
      safetensors_bytes({tensor("a.weight", "U8", {128, 1}, 1),
                         tensor("a.weight.absmax", "F32", {4}, 4),
                         table("a.weight.quant_map", bnb4_values(Bnb4Code::nf4)),
                         text_tensor("a.weight.quant_state.bitsandbytes__nf4", state())}));
  catalog_ = open_checkpoint("/nowhere/file.safetensors", {.storage = &storage});
  EXPECT_EQ(&catalog_->storage(), &storage);
  EXPECT_THAT(lines(find_quantized_tensors(*catalog_)), ElementsAre("a.weight: nf4, bnb_nf4"));
  EXPECT_THAT(lines(catalog_->quantized()), ElementsAre("a.weight: nf4, bnb_nf4"));
  LoggingStorage other(storage);
  EXPECT_THAT(find_quantized_tensors(*catalog_, &other).tensors(), SizeIs(1));
  EXPECT_THAT(other.accesses(), SizeIs(2));  // the state and the code table
}

// verify, load and convert must also read through the catalog's storage.
TEST_F(QuantizedTensorsTest, ACatalogIsUsedThroughItsStorage) {
  MemoryStorage storage;
  storage.add_file("/nowhere/file.safetensors",
                   safetensors_bytes({tensor("a", "F32", {4}, 4), tensor("b", "U8", {2}, 1)}));
  catalog_ = open_checkpoint("/nowhere/file.safetensors", {.storage = &storage});
  EXPECT_EQ(verify_values(*catalog_).bytes_read, 18u);
  EXPECT_TRUE(compare(*catalog_, *catalog_).ok());
  const Plan plan = make_plan(catalog_, Skeleton::from_catalog(*catalog_));
  const HostMemory memory(plan);
  EXPECT_EQ(execute(plan, memory.destinations()).bytes_read, 18u);
  const Conversion conversion = make_conversion(catalog_, ConvertOptions());
  convert(conversion, folder_ / "out.safetensors");
  EXPECT_TRUE(compare(*catalog_, *open_checkpoint(folder_ / "out.safetensors")).ok());
}

}  // namespace
}  // namespace loadstone::test
