// Tests the type mixes of llama.cpp. The digests below cover the types that llama.cpp's
// tests/snapshots list for published models, with the mixes in loadstone's order.
#include "convert/choose/gguf_mix.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>
#include <map>

#include "base/text.h"
#include "support/sha256.h"

namespace loadstone::test {

namespace {

using ::testing::ElementsAre;

struct Model {
  MixModel facts;
  std::vector<std::pair<std::string, Shape>> tensors;

  void add(const std::string& name, Shape shape) { tensors.emplace_back(name, std::move(shape)); }
  void add_layer(std::uint64_t layer, const std::string& name, Shape shape) {
    add(fmt::format("blk.{}.{}.weight", layer, name), std::move(shape));
  }
};

std::vector<std::pair<std::string, Encoding>> types_of(const Model& model, const Mix& mix,
                                                       bool has_importance = false) {
  std::vector<MixTensor> tensors;
  for (const auto& [name, shape] : model.tensors) {
    if (is_mixed(name, shape, model.facts.architecture)) tensors.push_back({name, &shape, {}});
  }
  const auto types = mixed_types(mix, model.facts, has_importance, tensors);
  std::vector<std::pair<std::string, Encoding>> named;
  for (std::size_t i = 0; i < types.size(); ++i) named.emplace_back(tensors[i].name, types[i]);
  return named;
}

// Lists tensors that differ from the default type, in the format and order of llama.cpp's tests.
std::string text_of(const Model& model) {
  std::string text;
  for (const Mix& mix : mixes()) {
    text += fmt::format("[{}]\n", mix.name);
    for (const auto& [name, type] : types_of(model, mix)) {
      if (type == mix.type) continue;
      std::string lower(type.name());
      std::ranges::transform(lower, lower.begin(), [](char c) {
        return static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
      });
      text += fmt::format("{} {}\n", name, lower);
    }
  }
  return text;
}

std::string digest_of(const Model& model) {
  const std::string text = text_of(model);
  return sha256(std::as_bytes(std::span(text)));
}

struct Sizes {
  std::uint64_t layers, embd, heads, kv_heads, head, ff;
};

// Returns a model with the attention and feed-forward tensors of most architectures. Its norms and
// biases are never quantized.
Model plain_model(const std::string& architecture, const Sizes& sizes, bool has_output) {
  Model model = {.facts = {.architecture = architecture,
                           .layers = sizes.layers,
                           .heads = sizes.heads,
                           .kv_heads = sizes.kv_heads}};
  if (has_output) model.add("output.weight", {1000, sizes.embd});
  model.add("output_norm.weight", {sizes.embd});
  model.add("token_embd.weight", {1000, sizes.embd});
  for (std::uint64_t i = 0; i < sizes.layers; ++i) {
    model.add_layer(i, "attn_k", {sizes.kv_heads * sizes.head, sizes.embd});
    model.add_layer(i, "attn_norm", {sizes.embd});
    model.add_layer(i, "attn_output", {sizes.embd, sizes.heads * sizes.head});
    model.add_layer(i, "attn_q", {sizes.heads * sizes.head, sizes.embd});
    model.add_layer(i, "attn_v", {sizes.kv_heads * sizes.head, sizes.embd});
    model.add_layer(i, "ffn_down", {sizes.embd, sizes.ff});
    model.add_layer(i, "ffn_gate", {sizes.ff, sizes.embd});
    model.add_layer(i, "ffn_up", {sizes.ff, sizes.embd});
  }
  return model;
}

TEST(GgufMix, PublishedModelsGetLlamaCppsTypes) {
  EXPECT_EQ(digest_of(plain_model("qwen3", {28, 1024, 16, 8, 128, 3072}, true)),
            "23de4747c22a5f08a22d0dc76e8a6ff51e96d1f19d96d990bdc27f8b8d40dc59");
  EXPECT_EQ(digest_of(plain_model("qwen3", {40, 5120, 40, 8, 128, 17408}, true)),
            "56e570b0017f9b9f677096ea563173e45d2700800cb3c60f26d68e2fe2b54f3b");
  EXPECT_EQ(digest_of(plain_model("llama", {80, 8192, 64, 8, 128, 28672}, true)),
            "890d3e2dada26681f5acc33f536ed14049c5096dd34b687bdfbb92fa812ba494");
  EXPECT_EQ(digest_of(plain_model("gemma3", {34, 2560, 8, 4, 256, 10240}, false)),
            "5e48b97e8f0fe1b8df980d88bc14a462de2f341cd48e6a1a8460874b157ec085");
}

// Control for the previous test: the model with 64 key/value heads has a different digest.
TEST(GgufMix, AnotherModelHasOtherTypes) {
  EXPECT_NE(digest_of(plain_model("llama", {80, 8192, 64, 64, 128, 28672}, true)),
            "890d3e2dada26681f5acc33f536ed14049c5096dd34b687bdfbb92fa812ba494");
}

// In gpt-oss-120b, rows of 2880 values are not a multiple of the block size 256, so llama.cpp uses
// a fallback type for each tensor.
TEST(GgufMix, ExpertsWhoseRowsFallBack) {
  Model model = {
      .facts = {
          .architecture = "gpt-oss", .layers = 36, .experts = 128, .heads = 64, .kv_heads = 8}};
  model.add("output.weight", {1000, 2880});
  model.add("token_embd.weight", {1000, 2880});
  for (std::uint64_t i = 0; i < 36; ++i) {
    model.add_layer(i, "attn_k", {512, 2880});
    model.add_layer(i, "attn_output", {2880, 4096});
    model.add_layer(i, "attn_q", {4096, 2880});
    model.add_layer(i, "attn_v", {512, 2880});
    model.add_layer(i, "ffn_down_exps", {128, 2880, 2880});
    model.add_layer(i, "ffn_gate_exps", {128, 2880, 2880});
    model.add_layer(i, "ffn_gate_inp", {128, 2880});
    model.add_layer(i, "ffn_up_exps", {128, 2880, 2880});
  }
  EXPECT_EQ(digest_of(model), "f0702072c280c31ec7460c0476cf5bdd0c803b4a14d22b3eb5320ffde915ec24");
}

// DeepSeek-V3.1 has latent attention with stacked projections, three dense layers, and layers with
// routed and shared experts.
TEST(GgufMix, LatentAttentionAndSharedExperts) {
  Model model = {
      .facts = {
          .architecture = "deepseek2", .layers = 61, .experts = 256, .heads = 128, .kv_heads = 1}};
  model.add("output.weight", {1000, 7168});
  model.add("token_embd.weight", {1000, 7168});
  for (std::uint64_t i = 0; i < 61; ++i) {
    model.add_layer(i, "attn_k_b", {128, 512, 128});
    model.add_layer(i, "attn_kv_a_mqa", {576, 7168});
    model.add_layer(i, "attn_output", {7168, 16384});
    model.add_layer(i, "attn_q_a", {1536, 7168});
    model.add_layer(i, "attn_q_b", {24576, 1536});
    model.add_layer(i, "attn_v_b", {128, 128, 512});
    if (i < 3) {
      model.add_layer(i, "ffn_down", {7168, 18432});
      model.add_layer(i, "ffn_gate", {18432, 7168});
      model.add_layer(i, "ffn_up", {18432, 7168});
      continue;
    }
    model.add_layer(i, "ffn_down_exps", {256, 7168, 2048});
    model.add_layer(i, "ffn_down_shexp", {7168, 2048});
    model.add_layer(i, "ffn_gate_exps", {256, 2048, 7168});
    model.add_layer(i, "ffn_gate_inp", {256, 7168});
    model.add_layer(i, "ffn_gate_shexp", {2048, 7168});
    model.add_layer(i, "ffn_up_exps", {256, 2048, 7168});
    model.add_layer(i, "ffn_up_shexp", {2048, 7168});
  }
  EXPECT_EQ(digest_of(model), "cdfe54b6652e21965e4935e3b5e3531975aacad43962007ecf80bf10b1559ce6");
}

Encoding type_in(const Model& model, std::string_view mix, std::string_view name,
                 bool has_importance = false) {
  for (const auto& [tensor, type] : types_of(model, *find_mix(mix), has_importance)) {
    if (tensor == name) return type;
  }
  ADD_FAILURE() << name << " is not mixed";
  return Dtype::boolean;
}

// The expected types were derived by hand from llama-quant.cpp.
TEST(GgufMix, EightExpertsFalconAndImportance) {
  Model mixtral = plain_model("llama", {32, 4096, 32, 8, 128, 14336}, true);
  mixtral.facts.experts = 8;
  EXPECT_EQ(type_in(mixtral, "q4_k_m", "blk.9.attn_v.weight"), Encoding(BlockFormat::q8_0));
  EXPECT_EQ(type_in(mixtral, "q4_k_m", "blk.9.attn_k.weight"), Encoding(BlockFormat::q8_0));
  EXPECT_EQ(type_in(mixtral, "q4_k_m", "blk.9.attn_output.weight"), Encoding(BlockFormat::q5_k));
  EXPECT_EQ(type_in(mixtral, "iq2_xxs", "blk.9.attn_k.weight"), Encoding(BlockFormat::q4_k));
  const Model falcon = plain_model("falcon", {32, 4544, 71, 1, 64, 18176}, true);
  EXPECT_EQ(type_in(falcon, "q4_k_m", "output.weight"), Encoding(BlockFormat::q8_0));
  EXPECT_EQ(type_in(falcon, "q4_k_m", "blk.0.ffn_down.weight"), Encoding(BlockFormat::q6_k));
  EXPECT_EQ(type_in(falcon, "q4_k_m", "blk.2.ffn_down.weight"), Encoding(BlockFormat::q5_k));
  EXPECT_EQ(type_in(falcon, "q4_k_m", "blk.4.ffn_down.weight"), Encoding(BlockFormat::q4_k));
  EXPECT_EQ(type_in(falcon, "q4_k_m", "blk.4.ffn_up.weight"), Encoding(BlockFormat::q5_0));
  const Model llama = plain_model("llama", {32, 4096, 32, 32, 128, 11008}, true);
  EXPECT_EQ(type_in(llama, "q4_0", "blk.1.ffn_down.weight"), Encoding(BlockFormat::q4_0));
  EXPECT_EQ(type_in(llama, "q4_0", "blk.1.ffn_down.weight", true), Encoding(BlockFormat::q4_1));
  EXPECT_EQ(type_in(llama, "iq4_xs", "blk.1.ffn_down.weight"), Encoding(BlockFormat::q5_k));
  EXPECT_EQ(type_in(llama, "iq4_xs", "blk.1.ffn_down.weight", true), Encoding(BlockFormat::iq4_xs));
}

TEST(GgufMix, WhichTensorsAreQuantizedAtAll) {
  const Shape matrix = {256, 256};
  EXPECT_TRUE(is_mixed("blk.0.attn_q.weight", matrix, "llama"));
  EXPECT_TRUE(is_mixed("blk.0.ffn_up_exps.weight", {8, 256, 256}, "llama"));
  EXPECT_FALSE(is_mixed("blk.0.attn_q.bias", matrix, "llama"));
  EXPECT_FALSE(is_mixed("blk.0.attn_q.weight", {256}, "llama"));
  EXPECT_FALSE(is_mixed("blk.0.attn_q.weight", {1, 256}, "llama"));  // ggml sees one dimension
  EXPECT_FALSE(is_mixed("blk.0.ffn_gate_inp.weight", matrix, "llama"));
  EXPECT_FALSE(is_mixed("blk.0.attn_q_norm.weight", matrix, "llama"));
  EXPECT_FALSE(is_mixed("position_embd.weight", matrix, "bert"));
  EXPECT_TRUE(is_mixed("blk.0.attn_k_b.weight", matrix, "deepseek2"));
  EXPECT_FALSE(is_mixed("blk.0.attn_k_b.weight", matrix, "glm5-next"));
}

TEST(GgufMix, FactsComeFromMetadata) {
  const auto number = [](std::uint64_t value) {
    return MetadataValue{.value = value, .type = MetadataType::u32};
  };
  Metadata metadata = {{"general.architecture", {.value = "llama"}}};
  EXPECT_FALSE(mix_model(metadata).has_value());
  metadata.emplace("llama.block_count", number(32));
  metadata.emplace("llama.attention.head_count", number(24));
  EXPECT_EQ(mix_model(metadata)->kv_heads, 24u);  // defaults to all heads
  MetadataArray heads(MetadataType::i32);
  heads.assign_numbers({std::byte{6}, {}, {}, {}, std::byte{9}, {}, {}, {}});
  metadata.emplace("llama.attention.head_count_kv",
                   MetadataValue{.value = heads, .type = MetadataType::array});
  EXPECT_EQ(mix_model(metadata)->kv_heads, 6u);  // the count of the first layer
  EXPECT_EQ(mix_model(metadata)->experts, 0u);
}

TEST(GgufMix, NamesAndFileTypes) {
  EXPECT_EQ(find_mix("Q4_K_M"), find_mix("q4_k_m"));
  EXPECT_EQ(find_mix("q4_k"), nullptr);
  EXPECT_EQ(find_mix("q4_k_m")->file_type, 15u);
  EXPECT_EQ(find_mix("mxfp4_moe")->file_type, 38u);
  EXPECT_EQ(fitting_type(BlockFormat::q6_k, {2, 96}), Encoding(BlockFormat::q8_0));
  EXPECT_EQ(fitting_type(BlockFormat::q6_k, {2, 40}), Encoding(Dtype::f16));
  EXPECT_EQ(fitting_type(BlockFormat::q8_0, {2, 40}), Encoding(Dtype::f16));
  EXPECT_EQ(fitting_type(BlockFormat::q6_k, {2, 512}), Encoding(BlockFormat::q6_k));
}

}  // namespace

}  // namespace loadstone::test
