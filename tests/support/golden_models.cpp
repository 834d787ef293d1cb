#include "support/golden_models.h"

#include <fmt/format.h>

#include <bit>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "loadstone/shape.h"
#include "support/samples.h"

namespace loadstone::test {

namespace {

using Shapes = std::vector<std::pair<std::string, std::vector<std::uint64_t>>>;

// Returns a tensor of finite BF16 values around zero. Its name and `seed` determine the values.
FileTensor weight(const std::string& name, const std::vector<std::uint64_t>& shape, unsigned seed) {
  std::seed_seq sequence(name.begin(), name.end());
  std::mt19937 random(sequence);
  random.discard(seed);
  std::string bytes;
  for (std::uint64_t i = 0; i < Shape(shape).numel().value_or(0); ++i) {
    const float value = (static_cast<float>(random() >> 8) / 8388608.0F - 1.0F) * 2.0F;
    bytes += raw(static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16));
  }
  return {name, "BF16", shape, std::move(bytes)};
}

std::string weights(const Shapes& shapes, unsigned seed = 0,
                    const std::map<std::string, std::string>& metadata = {{"format", "pt"}}) {
  std::vector<FileTensor> tensors;
  for (const auto& [name, shape] : shapes) tensors.push_back(weight(name, shape, seed));
  return safetensors_bytes(tensors, metadata);
}

const Shapes& moe_shapes() {
  static const Shapes shapes = [] {
    Shapes all = {{"model.embed_tokens.weight", {64, 128}},
                  {"model.norm.weight", {128}},
                  {"model.layers.2.mtp.eh_proj.weight", {128, 128}},
                  {"visual.blocks.0.attn.qkv.weight", {96, 128}},
                  {"lm_head.weight", {64, 128}},
                  {"model.layers.1.mlp.down_proj.weight", {128, 100}}};
    for (const char* const layer : {"model.layers.0.", "model.layers.1."}) {
      for (const char* const name : {"q_proj", "k_proj", "v_proj", "o_proj"}) {
        all.push_back({fmt::format("{}self_attn.{}.weight", layer, name), {128, 128}});
      }
      all.push_back({fmt::format("{}self_attn.q_proj.bias", layer), {128}});
      all.push_back({fmt::format("{}input_layernorm.weight", layer), {128}});
    }
    for (const int expert : {0, 1}) {
      for (const char* const name : {"gate_proj", "up_proj", "down_proj"}) {
        all.push_back({fmt::format("model.layers.0.mlp.experts.{}.{}.weight", expert, name),
                       name == std::string_view("down_proj")
                           ? std::vector<std::uint64_t>{128, 256}
                           : std::vector<std::uint64_t>{256, 128}});
      }
    }
    all.push_back({"model.layers.0.mlp.gate.weight", {2, 128}});
    return all;
  }();
  return shapes;
}

const Shapes stack_shapes = {{"model.embed_tokens.weight", {64, 128}},
                             {"model.layers.0.self_attn.q_proj.weight", {128, 128}},
                             {"model.layers.0.mlp.experts.gate_up_proj", {3, 256, 128}},
                             {"model.layers.0.mlp.experts.down_proj", {3, 128, 128}},
                             {"model.layers.0.mlp.gate.weight", {3, 128}}};

// Returns tensors with llama.cpp's names. There are 16 layers, because the type of a tensor can
// depend on which eighth of the layers contains the tensor.
Shapes llama_shapes(std::uint64_t rows) {
  Shapes all = {{"token_embd.weight", {rows, 256}}, {"output_norm.weight", {256}}};
  for (int layer = 0; layer < 16; ++layer) {
    for (const char* const name : {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_up",
                                   "ffn_gate", "ffn_down", "attn_qkv"}) {
      all.push_back({fmt::format("blk.{}.{}.weight", layer, name), {rows, 256}});
    }
    all.push_back({fmt::format("blk.{}.attn_norm.weight", layer), {256}});
  }
  all.push_back({"blk.0.ffn_gate_inp.weight", {4, 256}});
  all.push_back({"blk.0.odd.weight", {16, 96}});
  return all;
}

const Shapes wan_shapes = {{"blocks.0.self_attn.norm_q.weight", {256}},
                           {"text_embedding.2.weight", {32, 256}},
                           {"head.modulation", {1, 2, 256}},
                           {"blocks.0.self_attn.v.weight", {32, 256}},
                           {"blocks.0.ffn.2.weight", {64, 256}},
                           {"blocks.0.self_attn.q.weight", {32, 256}},
                           {"blocks.0.self_attn.k.weight", {32, 100}}};

const Shapes gpt2_shapes = {{"wte.weight", {64, 96}},
                            {"h.0.ln_1.weight", {96}},
                            {"h.0.attn.c_attn.weight", {96, 288}},
                            {"h.0.attn.c_proj.weight", {96, 96}},
                            {"h.0.mlp.c_fc.weight", {96, 384}},
                            {"h.0.mlp.c_proj.weight", {384, 96}}};

Shapes renamed(Shapes shapes, std::string_view before, std::string_view after) {
  for (auto& [name, shape] : shapes) {
    const auto at = name.find(before);
    if (at != std::string::npos) name.replace(at, before.size(), after);
  }
  return shapes;
}

}  // namespace

void write_golden_models(const TemporaryFolder& folder) {
  const auto model = [&](const std::string& name, const std::string& config, const Shapes& shapes,
                         unsigned seed = 0) {
    folder.write(name + "/model.safetensors", weights(shapes, seed));
    folder.write(name + "/config.json", config);
  };
  const std::string moe = R"({"architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16",
  "model_type": "qwen3_moe", "num_hidden_layers": 2, "vocab_size": 64,
  "text_config": {"torch_dtype": "bfloat16"}, "tie_word_embeddings": false})";
  model("moe", moe, moe_shapes());
  folder.write("moe/generation_config.json", R"({"eos_token_id": 2})");
  folder.write("moe/tokenizer.json", R"({"model": {"vocab": {"a": 0}}})");
  folder.write("moe/tokenizer_config.json", R"({"bos_token": "<s>"})");
  folder.write("moe/README.md", "text");
  folder.write("moe/modeling.py", "pass");
  folder.write("moe/pytorch_model.bin", "x");
  model("moe2", R"({"model_type": "qwen3_moe", "rope_theta": 5, "vocab_size": 64})", moe_shapes(),
        7);
  folder.write("moe2/generation_config.json", R"({"eos_token_id": 3})");
  folder.write("moe2/tokenizer.json", R"({"model": {"vocab": {"b": 0}}})");
  folder.write("moe2/modules.json", R"([{"path": "1_Pooling"}])");
  folder.write("moe2/1_Pooling/config.json", R"({"a": 1})");
  model("mixed", moe, moe_shapes());
  folder.write("mixed/model.safetensors", mixed_file());
  for (const char* const type : {"qwen3_moe", "mixtral", "lfm2_moe", "llama4"}) {
    model(fmt::format("stack-{}", type), fmt::format(R"({{"model_type": "{}"}})", type),
          renamed(stack_shapes, ".mlp.",
                  type == std::string_view("mixtral") ? ".block_sparse_moe." : ".mlp."));
  }
  for (const char* const type : {"falcon", "dinov2", "ernie4_5_vl_moe", "deepseek_v3"}) {
    model(fmt::format("type-{}", type), fmt::format(R"({{"model_type": "{}"}})", type),
          renamed(moe_shapes(), "self_attn.o_proj", "self_attn.kv_b_proj"));
  }
  model("gpt2", R"({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]})", gpt2_shapes);
  model("diffusers", R"({"_class_name": "FluxTransformer2DModel"})",
        renamed(moe_shapes(), "model.layers.", "transformer_blocks."));
  model("tied", R"({"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": true,
  "vocab_size": 64})",
        {{"model.embed_tokens.weight", {64, 128}},
         {"lm_head.weight", {64, 128}},
         {"model.layers.0.self_attn.q_proj.weight", {128, 128}}});
  folder.write("adapter/adapter_config.json",
               R"({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]})");
  folder.write(
      "adapter/adapter_model.safetensors",
      weights({{"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", {4, 128}},
               {"base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight", {128, 4}}}));
  folder.write("llama.safetensors", weights(llama_shapes(16)));
  folder.write("small.safetensors", weights({{"token_embd.weight", {8, 256}},
                                             {"blk.0.attn_q.weight", {16, 256}},
                                             {"blk.0.attn_v.weight", {16, 256}},
                                             {"blk.0.ffn_down.weight", {8, 96}},
                                             {"blk.0.attn_norm.weight", {256}}}));
  folder.write("wan.safetensors", weights(wan_shapes));
  folder.write("sd1.safetensors", weights({{"down_blocks.0.downsamplers.0.conv.weight", {32, 256}},
                                           {"conv_in.weight", {32, 256}},
                                           {"mid.attn.to_v.weight", {32, 256}},
                                           {"mid.ff.net.2.weight", {32, 256}}}));
}

}  // namespace loadstone::test
