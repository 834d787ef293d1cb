#include "convert/choose/quantize_rules.h"

namespace loadstone {

namespace {

constexpr std::string_view is_subclass =
    "weight of a subclass of nn.Linear, which transformers does not replace with a bitsandbytes "
    "layer";
constexpr std::string_view single_expert = R"(\.experts\.\d+\.)";
constexpr std::string_view is_joined =
    "single experts, which transformers joins without their scales";
constexpr std::string_view sequential_types = "llama4|llama4_text";
constexpr std::string_view is_scattered =
    "single experts, which neither transformers nor loadstone joins to the stacks of this model";
constexpr std::string_view keep_stacks =
    "keep the stacks of the original checkpoint (--experts keep)";

// For each use, the first matching rule gives the reason that loadstone reports.
constexpr PlainRule layer_rules[] = {
    {RuleUse::plain,
     R"((^|\.)(embed_tokens|word_embeddings|wte|wpe|embed_in|tok_embeddings|embeddings?|)"
     R"(embed_positions|patch_embed\w*|pos_embed\w*)\.)",
     "embedding",
     {},
     false},
    {RuleUse::plain,
     R"((^|\.)((\w*_)?emb|\w*(_embed|embeddings?)|embedding_table|relative_attention_bias|)"
     R"(shared)\.weight$)",
     "embedding",
     {},
     false},
    {RuleUse::plain,
     R"((^|\.)(lm_head|output|embed_out|output_layer|proj_out|score|classifier)(\.weight)?$)",
     "output head",
     {}},
    {RuleUse::plain, R"(norm\w*\.weight$|(^|\.)ln_\w+\.weight$)", "norm", {}, false},
    {RuleUse::plain,
     R"(\.(mlp|feed_forward|ffn|block_sparse_moe|moe|mixer)\.(gate|router\w*)(\.|$)|)"
     R"(\.(router|shared_expert_gate)(\.|$)|\.gate(\.wg)?(\.weight)?$)",
     "router",
     {}},
    {RuleUse::plain,
     R"((^|\.)(visual|vision\w*|video_(tower|model|encoder)|image_\w+|img_\w+|vit|audio\w*|)"
     R"(speech\w*|multi_modal_projector|mm_projector|connector|aligner|resampler|merger|)"
     R"(patch_merger|sam_model|qwen2_model)(\.|$))",
     "vision or audio tower",
     {}},
    {RuleUse::plain, R"(conv\w*\.)", "convolution", {}, false},
    {RuleUse::plain,
     R"(\.linear_attn\.in_proj_(a|b|ba)(\.|$)|\.(dt_proj|x_proj|A_log|dt_bias)\b)",
     "small projection of a state-space layer",
     {}},
    {RuleUse::plain,
     R"((^|\.)(mtp|mtp_\w+|nextn\w*)\.|\.(eh_proj|enorm|hnorm|shared_head)(\.|$))",
     "layer of the multi-token prediction",
     {}},
    {RuleUse::plain, R"(\.kv_b_proj(\.|$))",
     "weight that servers absorb into the attention and need unquantized",
     "deepseek_v2|deepseek_v3|deepseek_v32|kimi_k2|glm_moe_dsa|glm4_moe_lite|longcat_flash"},
    {RuleUse::plain, R"(\.indexer\.)", "indexer of the sparse attention", {}},
    {RuleUse::plain,
     R"(\.DenseReluDense\.wo(\.|$)|\.(self_)?attn\.compressor\.)",
     "transformers keeps it in F32 and does not quantize it",
     {}},
    {RuleUse::plain, R"(lora_[AB](\.|$)|\.lora_\w+(\.|$))", "adapter", {}},
    {RuleUse::plain, R"(\.(per_layer_\w+|altup|laurel)\b)", "small projection of this model",
     "gemma3n\\w*|gemma4\\w*"},
    {RuleUse::plain,
     R"(weight\.(.*\.)?weight$)",
     "module name that ends in 'weight', which transformers confuses with the tensor's name",
     {},
     false},

    {RuleUse::bnb, "", is_subclass, "falcon"},
    {RuleUse::bnb, R"(\.(o_a_proj|wo_a)\.)", is_subclass, "deepseek_v4"},

    {RuleUse::joined, single_expert, PlainRule::is_read, sequential_types},
    {RuleUse::joined, single_expert, is_joined, ".+", true,
     "transformers reads fp8 and fp8-channel only in the style compressed-tensors"},

    {RuleUse::split,
     R"((qkv|\bw(_qkv|12|13_dn)|shared_w13_weight|(qkv|att|ff|gate_up|up_gate|in)_proj|weights_in))"
     R"((\.weight)?$)",
     "layers that transformers splits without their scales",
     "dinov2\\w*|gradium_phonon_tts|gte|hrm_text|inkling_mm_model|jina_embeddings_v3|"
     "molmo2(_text)?|nemo_speechlm|nomic_bert|radio|rf_detr|sapiens2|tipsv2\\w*",
     true, "do not quantize this model"},
    {RuleUse::split, "", "layers that transformers renames, but not in the config",
     "inkling_mm_model|rf_detr", true, "do not quantize this model"},
    {RuleUse::split, "", "layers that transformers joins or renames, but not in the config",
     "minimax_m3_vl", true, "do not quantize this model"},
    {RuleUse::split, single_expert, is_joined, "ernie4_5_vl_moe|hy_v4|qwen3_vl_moe"},
    {RuleUse::split, single_expert, is_scattered, "gpt_oss", true, keep_stacks},

    {RuleUse::scattered, single_expert, is_scattered, "gpt_oss", true, keep_stacks},
    {RuleUse::scattered, single_expert, is_scattered, sequential_types, true,
     "keep the stacks (--experts keep), or choose the style compressed-tensors"},

    {RuleUse::lost, R"(\.experts\.(gate_up|down)_proj$)",
     "stacks of experts, which transformers replaces with single experts of random values",
     sequential_types, true, "separate the experts (--experts separate)"},
    {RuleUse::lost, single_expert,
     "single experts, which transformers replaces with stacks of random values",
     "gpt_oss|qwen3_vl_moe", true, keep_stacks},
};

}  // namespace

std::span<const PlainRule> plain_rules() noexcept { return layer_rules; }

}  // namespace loadstone
