// Tests GGUF output of image and video models: the detected architecture, and the type of each
// tensor.
#include "convert/choose/gguf_image.h"

#include <gmock/gmock.h>

#include <memory>

#include "convert/choose/gguf_mix.h"
#include "loadstone/convert.h"
#include "support/files.h"
#include "support/samples.h"

namespace loadstone::test {

namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::shared_ptr<const Catalog> catalog_of(const TemporaryFolder& folder,
                                          const std::vector<std::string>& names) {
  std::vector<FileTensor> tensors;
  for (const std::string& name : names) {
    tensors.push_back({name, "BF16", {2, 2}, std::string(8, '\1')});
  }
  return open_checkpoint(folder.write("model.safetensors", safetensors_bytes(tensors)));
}

const std::vector<std::string> wan = {"blocks.0.self_attn.norm_q.weight", "text_embedding.2.weight",
                                      "head.modulation"};

TEST(GgufImage, AModelIsRecognisedByItsOwnNames) {
  const TemporaryFolder folder;
  const ImageModel* const model = recognised_image_model(*catalog_of(folder, wan));
  ASSERT_NE(model, nullptr);
  EXPECT_EQ(model->architecture, "wan");
  EXPECT_EQ(model, find_image_model("wan"));
}

TEST(GgufImage, APrefixOfComfyIsNoOtherName) {
  const TemporaryFolder folder;
  std::vector<std::string> names;
  for (const std::string& name : wan) names.push_back("model.diffusion_model." + name);
  EXPECT_EQ(recognised_image_model(*catalog_of(folder, names)), find_image_model("wan"));
}

TEST(GgufImage, PartOfTheNamesIsNotEnough) {
  const TemporaryFolder folder;
  EXPECT_EQ(recognised_image_model(*catalog_of(folder, {wan[0], wan[1]})), nullptr);
}

TEST(GgufImage, TheMoreSpecialModelCounts) {
  const TemporaryFolder folder;
  const std::vector<std::string> blocks = {"down_blocks.0.downsamplers.0.conv.weight"};
  EXPECT_EQ(recognised_image_model(*catalog_of(folder, blocks)), find_image_model("sd1"));
  std::vector<std::string> more = blocks;
  more.emplace_back("add_embedding.linear_1.weight");
  EXPECT_EQ(recognised_image_model(*catalog_of(folder, more)), find_image_model("sdxl"));
}

TEST(GgufImage, MatricesOfBlocksAreQuantized) {
  const ImageModel& model = *find_image_model("wan");
  const Shape matrix = {512, 256};
  EXPECT_TRUE(is_image_mixed(model, "blocks.3.self_attn.q.weight", matrix));
  EXPECT_TRUE(is_image_mixed(model, "blocks.3.self_attn.q.weight", {1, 512, 256}));
  EXPECT_FALSE(is_image_mixed(model, "blocks.3.self_attn.q.weight", {1, 4096}));
  EXPECT_FALSE(is_image_mixed(model, "blocks.3.self_attn.q.weight", {512, 16, 16}));
  EXPECT_FALSE(is_image_mixed(model, "blocks.3.self_attn.q.bias", matrix));
  EXPECT_FALSE(is_image_mixed(model, "head.head.weight", matrix));
  EXPECT_FALSE(is_image_mixed(model, "condition_embedder.time_proj.weight", matrix));
  EXPECT_FALSE(is_image_mixed(model, "blocks.3.tiny.weight", {4, 256}));
}

TEST(GgufImage, VectorsAndTablesAreWide) {
  const ImageModel& model = *find_image_model("wan");
  EXPECT_TRUE(is_wide(model, "blocks.3.self_attn.q.bias", {4096}));
  EXPECT_TRUE(is_wide(model, "blocks.3.modulation", {1, 6, 4096}));
  EXPECT_TRUE(is_wide(model, "blocks.3.tiny.weight", {4, 256}));
  EXPECT_TRUE(is_wide(model, "blocks.3.scale_shift_table", {1, 6, 4096}));
  EXPECT_TRUE(is_wide(model, "patch_embedding.weight", {512, 16, 1, 2, 2}));
  EXPECT_FALSE(is_wide(model, "text_embedding.0.weight", {512, 4096}));
}

TEST(GgufImage, TypesFollowThePartOfABlock) {
  const Shape shape = {512, 256};
  const std::vector<MixTensor> tensors = {{"blocks.10.self_attn.v.weight", &shape, {}},
                                          {"blocks.2.self_attn.v.weight", &shape, {}},
                                          {"blocks.1.self_attn.v.weight", &shape, {}},
                                          {"blocks.0.ffn.2.weight", &shape, {}},
                                          {"double_blocks.0.img_attn.qkv.weight", &shape, {}},
                                          {"blocks.0.ffn.0.weight", &shape, {}}};
  using Block = BlockFormat;
  EXPECT_THAT(
      image_types(*find_mix("q4_k_m"), tensors),
      ElementsAre(Block::q6_k, Block::q6_k, Block::q6_k, Block::q6_k, Block::q5_k, Block::q4_k));
  // Blocks are ordered as numbers: 1, 2, 10.
  EXPECT_THAT(
      image_types(*find_mix("q3_k_m"), tensors),
      ElementsAre(Block::q4_k, Block::q5_k, Block::q5_k, Block::q4_k, Block::q4_k, Block::q3_k));
}

TEST(GgufImage, RowsThatAreNoWholeBlocksGetSmallerOnes) {
  const Shape shape = {512, 320};
  const std::vector<MixTensor> tensors = {{"blocks.0.ffn.0.weight", &shape, {}},
                                          {"blocks.0.ffn.1.weight", &shape, Dtype::bf16}};
  EXPECT_THAT(image_types(*find_mix("q4_k_s"), tensors),
              ElementsAre(BlockFormat::q5_0, Dtype::bf16));
}

// Returns the finding that reports the detected architecture.
Finding finding_for(const std::shared_ptr<const Catalog>& catalog, const std::string& given = {}) {
  ConvertOptions options = {.format = FileFormat::gguf};
  if (!given.empty()) {
    options.metadata["general.architecture"] = {.value = given, .type = MetadataType::string};
  }
  const Conversion conversion = make_conversion(catalog, options);
  for (const Finding& finding : conversion.plan.findings) {
    if (finding.code == "convert.architecture") return finding;
  }
  return {};
}

TEST(GgufImage, TheArchitectureIsSaid) {
  const TemporaryFolder folder;
  const Finding finding = finding_for(catalog_of(folder, wan));
  EXPECT_EQ(finding.severity, Severity::info);
  EXPECT_THAT(finding.message, HasSubstr("'wan'"));
}

TEST(GgufImage, AnArchitectureOfAnotherModelIsAWarning) {
  const TemporaryFolder folder;
  const auto catalog = catalog_of(folder, wan);
  const Finding finding = finding_for(catalog, "flux");
  EXPECT_EQ(finding.severity, Severity::warning);
  EXPECT_EQ(finding.found, "flux");
  EXPECT_EQ(finding.expected, "wan");
  EXPECT_TRUE(finding_for(catalog, "wan").code.empty());
}

TEST(GgufImage, NamesOfDiffusersAreRefusedWithTheReason) {
  const TemporaryFolder folder;
  const Finding finding = finding_for(
      catalog_of(folder, {"transformer_blocks.0.attn.norm_added_k.weight", "proj_out.weight"}));
  EXPECT_EQ(finding.severity, Severity::error);
  EXPECT_THAT(finding.message, HasSubstr("diffusers' names"));
  EXPECT_THAT(finding_for(catalog_of(folder, {"x.weight"})).suggestion, HasSubstr("--arch NAME"));
}

}  // namespace

}  // namespace loadstone::test
