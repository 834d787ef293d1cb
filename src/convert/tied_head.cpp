#include "convert/tied_head.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <set>

#include "base/text.h"
#include "base/words.h"
#include "convert/json_text.h"
#include "formats/metadata.h"

namespace loadstone {

namespace {

constexpr std::string_view member = "tie_word_embeddings";
constexpr std::string_view head_name = "lm_head.weight";
constexpr std::string_view composite = "EncoderDecoderModel";
constexpr std::string_view decoder = "decoder";

// Values of "model_type" whose config classes in transformers 5.23 have tie_word_embeddings true by
// default: save_pretrained() then omits the member.
constexpr std::string_view tied_types =
    "albert aya_vision bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot "
    "blenderbot-small blip blip_text_model bloom camembert canary cohere cohere2 cohere2_moe "
    "cohere2_vision cohere_compass_text convbert cpmant ctrl d_fine dab-detr data2vec-text "
    "deberta deberta-v2 deepseek_vl deepseek_vl_hybrid deformable_detr deimv2 diffusion_gemma "
    "diffusion_gemma_text distilbert electra ernie ernie4_5 ernie4_5_moe ernie4_5_vl_moe "
    "ernie4_5_vl_moe_text esm falcon falcon_mamba flaubert flava florence2 fnet fun_asr_nano "
    "funnel gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_assistant "
    "gemma4_text gemma4_unified gemma4_unified_assistant gemma4_unified_text glmasr got_ocr2 "
    "gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox_japanese granite_docling granite_docling_text "
    "granite_speech granite_speech5_ctc granite_speech_plus granite_swa grounding-dino gte "
    "hunyuan_vl hunyuan_vl_text hyperclovax_vision_v2 ibert internvl janus jetmoe "
    "jina_embeddings_v3 kimi_k25 kosmos-2 kosmos-2.5 kosmos_2_5_text_model kosmos_2_text_model "
    "layoutlm led lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl lighton_ocr longformer longt5 luke lxmert "
    "m2m_100 mamba marian mbart megatron-bert mimi mimi_decoder mimi_encoder minicpm3 minicpm_ocr "
    "mistral3 mm-grounding-dino mobilebert modernbert modernbert-decoder moonshine "
    "moss_transcribe_diarize mpnet mpt mra mt5 mvp neomme nllb-moe nomic_bert nystromformer "
    "openai-gpt opt ovis2 paddleocr_vl paddleocr_vl_text paligemma pe_audio_video pegasus "
    "pegasus_x plbart pop2piano pp_chart2table pp_doclayout_v3 pp_doclayout_v4 prophetnet "
    "qwen2_5_omni_text qwen3_asr qwen3_vl_moe_text recurrent_gemma roberta roberta-prelayernorm "
    "roc_bert roformer rt_detr_v2 sam sam_hq seamless_m4t seamless_m4t_v2 smollm3 speech_to_text "
    "speecht5 squeezebert starcoder2 switch_transformers t5_gemma_module t5gemma t5gemma2 "
    "t5gemma2_decoder t5gemma2_encoder t5gemma2_text tapas trocr udop vaultgemma vilt visual_bert "
    "voxtral_realtime whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xmod yoso youtu zamba "
    "zamba2 zaya";

// Suffixes of names of classes in transformers. `headless`: models without a head over the
// vocabulary. `headed`: exceptions that have a head, or that tie the embeddings of an encoder and a
// decoder.
constexpr std::string_view headless =
    "Model Encoder Classification ForQuestionAnswering ForMultipleChoice ForNextSentencePrediction";
constexpr std::string_view headed =
    "LMHeadModel DoubleHeadsModel MTModel Pix2StructTextModel BlipForQuestionAnswering "
    "ProphetNetModel T5Gemma2Model DiffusionGemmaModel ChatModel EncoderDecoderModel";

constexpr std::string_view gguf_embedding = "token_embd.weight";

// Architectures for which llama.cpp builds no head (`gguf_encoders`), or always uses the embedding
// as the head (`gguf_always_tied`). llama.cpp rejects their files if these have a separate head.
// Source: llama.cpp's models/*.cpp (llama-cpp-python 0.3.36).
constexpr std::string_view gguf_encoders =
    "bert modern-bert neo-bert eurobert nomic-bert nomic-bert-moe jina-bert-v2 jina-bert-v3 "
    "gemma-embedding t5encoder wavtokenizer-dec clip";
constexpr std::string_view gguf_always_tied =
    "bitnet cohere2 command-r gemma gemma2 gemma4-assistant openelm";

// Name of an embedding, and whether its head's name has the same prefix.
struct Layout {
  std::string_view embedding;
  bool keeps_prefix;  // true: "language_model.model.embed_tokens" has "language_model.lm_head"
};
constexpr auto layouts = std::to_array<Layout>({
    {"model.language_model.embed_tokens.weight", false},
    {"model.text_model.embed_tokens.weight", false},
    {"model.embed_tokens.weight", true},
    {"transformer.wte.weight", true},
    {"transformer.word_embeddings.weight", true},
    {"backbone.embeddings.weight", false},
});

// Heads with a name other than "lm_head", in models that tie the head and give it no bias.
struct OtherHead {
  std::string_view model_type;
  std::string_view module;
};
constexpr auto other_heads = std::to_array<OtherHead>({
    {"whisper", "proj_out"},
    {"moonshine", "proj_out"},
    {"moonshine_streaming", "proj_out"},
    {"canary", "proj_out"},
    {"cohere_asr", "proj_out"},
    {"biogpt", "output_projection"},
    {"trocr", "output_projection"},
    {"gpt_neox_japanese", "embed_out"},
    {"ultrabert", "head.decoder"},
});

// Returns true if the tensor is an embedding that encoder and decoder share. The name has this
// meaning in all model classes.
bool is_shared_embedding(std::string_view name) {
  return name == "shared.weight" || name.ends_with(".shared.weight");
}

// Returns true if the name contains a numbered layer, such as "h.0" in "h.0.attn.weight".
bool is_in_layer(std::string_view name) {
  for (auto dot = name.find('.'); dot != std::string_view::npos; dot = name.find('.', dot + 1)) {
    const std::string_view rest = name.substr(dot + 1);
    const auto end = rest.find('.');
    if (end != std::string_view::npos && is_digits(rest.substr(0, end))) return true;
  }
  return false;
}

std::string first_architecture(std::string_view config) {
  return value_at<std::string>(config, "/architectures/0").value_or("");
}

// Returns the config, and its members with these names that are objects.
std::vector<std::string_view> with_parts(std::string_view config, std::string_view names) {
  std::vector<std::string_view> parts = {config};
  for_each_word(names, [&](std::string_view name) {
    if (const auto part = object_member(config, name); !part.empty()) parts.push_back(part);
  });
  return parts;
}

}  // namespace

TiedHead::TiedHead(std::string_view config) {
  if (config.empty() || !is_json_object(config)) return;
  const std::string architecture = first_architecture(config);
  auto parts = with_parts(config, "text_config llm_config language_config");
  // A decoder with its own class is tied by its own config.
  if (architecture.ends_with(composite)) parts = {object_member(config, decoder)};
  for (const std::string_view part : parts) {
    if (!is_tied_) is_tied_ = value_at<bool>(part, "/tie_word_embeddings");
    if (const auto rows = value_at<std::uint64_t>(part, "/vocab_size")) rows_.push_back(*rows);
  }
  const auto is_tied = [](std::string_view part) {
    return is_word(string_member(part, "model_type"), tied_types);
  };
  if (!is_tied_ && std::ranges::any_of(parts, is_tied)) is_tied_ = true;
  has_head_ = ends_with_word(architecture, headed) || !ends_with_word(architecture, headless);
  is_masked_ = architecture.ends_with("ForMaskedLM");
  if (architecture.empty()) has_head_ = is_tied_.value_or(false);
}

TiedHead::TiedHead(std::string_view config, const Catalog& base) : TiedHead(config) {
  if (base.shards().front().format != FileFormat::gguf) return;
  const std::string* const architecture = find_text(base.metadata(), "general.architecture");
  if (architecture == nullptr) return;
  is_always_tied_ = is_word(*architecture, gguf_always_tied);
  is_gguf_ = !is_always_tied_ && !is_word(*architecture, gguf_encoders);
}

std::optional<std::string> TiedHead::head_of(
    std::string_view embedding, const std::function<bool(std::string_view)>& has) const {
  constexpr std::string_view gguf_head = "output.weight";
  if (is_gguf_ && embedding == gguf_embedding && !has(gguf_head)) {
    return std::string(gguf_head);
  }
  if (!has_head_ || is_masked_ || !is_tied_.value_or(true)) return std::nullopt;
  for (const Layout& layout : layouts) {
    if (!embedding.ends_with(layout.embedding)) continue;
    const std::string_view before = embedding.substr(0, embedding.size() - layout.embedding.size());
    if (!before.empty() && (!layout.keeps_prefix || !before.ends_with('.'))) continue;
    std::string head = std::string(before) + std::string(head_name);
    // If the config declares no tie, a file with both names has two separate tensors.
    if (!is_tied_ && has(head)) return std::nullopt;
    return head;
  }
  return std::nullopt;
}

std::vector<std::array<std::uint32_t, 2>> TiedHead::stored_in(const Catalog& catalog) const {
  std::vector<std::array<std::uint32_t, 2>> pairs;
  const std::uint32_t end = catalog.tensors_of(0).end;
  const auto has = [&](std::string_view name) { return catalog.find(name).has_value(); };
  for (std::uint32_t i = 0; i < end && has_head_ && is_tied_.value_or(false); ++i) {
    const auto head = head_of(catalog.tensors()[i].name, has);
    const auto found = head ? catalog.find(*head) : std::nullopt;
    if (found) pairs.push_back({i, *found});
  }
  return pairs;
}

std::optional<std::string> TiedHead::stored_in(
    const std::set<std::string, std::less<>>& names) const {
  if (!has_head_ || !is_tied_.value_or(false)) return std::nullopt;
  const auto has = [&](std::string_view name) { return names.contains(name); };
  for (const std::string& name : names) {
    auto head = head_of(name, has);
    if (head && has(*head)) return head;
  }
  return std::nullopt;
}

bool TiedHead::has_token_rows(const Shape& shape) const noexcept {
  return shape.rank() > 0 && std::ranges::find(rows_, shape[0]) != rows_.end();
}

bool TiedHead::may_tie(std::string_view name, const Shape& shape, bool has_twin) const noexcept {
  if (is_always_tied_) return name == gguf_embedding;
  // Weights of numbered layers can have as many rows as an embedding.
  if (is_in_layer(name) && name.find("emb") == std::string_view::npos) return false;
  return (has_head_ || is_shared_embedding(name)) && is_tied_.value_or(!has_twin) &&
         shape.rank() == 2 && std::ranges::find(rows_, shape[0]) != rows_.end();
}

std::vector<std::string> tied_modules(const Plan& plan, std::string_view config) {
  std::set<std::string_view> names;
  std::set<std::uint64_t> rows;
  for (const PlannedTarget& target : plan.targets) {
    names.insert(target.name);
    if (target.shape.rank() == 2 && !target.quantization) rows.insert(target.shape[0]);
  }
  std::vector<std::string> modules;
  for (const PlannedTarget& target : plan.targets) {
    constexpr std::string_view bias = ".bias";
    if (!target.name.ends_with(bias) || target.shape.rank() != 1) continue;
    const std::string module = target.name.substr(0, target.name.size() - bias.size());
    if (rows.contains(target.shape[0]) && !names.contains(module + ".weight")) {
      modules.push_back(module);
    }
  }
  if (config.find("\"vocab_size\"") == std::string_view::npos) return modules;
  std::vector<std::string_view> parts;
  if (is_json_object(config)) parts = with_parts(config, "decoder text_config");
  const std::size_t before = modules.size();
  for (const OtherHead& other : other_heads) {
    const bool is_of_model = std::ranges::any_of(parts, [&](std::string_view part) {
      return string_member(part, "model_type") == other.model_type;
    });
    if (is_of_model) modules.emplace_back(other.module);
  }
  if (modules.size() == before) modules.emplace_back("lm_head");
  return modules;
}

std::vector<Finding> check_tied_shapes(const Catalog& catalog, std::string_view config) {
  std::vector<Finding> findings;
  for (const auto& [embedding, head] : TiedHead(config).stored_in(catalog)) {
    const TensorInfo& first = catalog.tensors()[embedding];
    const TensorInfo& second = catalog.tensors()[head];
    const bool are_plain = first.encoding == second.encoding && first.encoding.is_dtype();
    if (!are_plain || first.shape == second.shape) continue;
    findings.push_back(
        {.severity = Severity::error,
         .code = "plan.shape",
         .target = second.name,
         .sources = {second.name, first.name},
         .message = fmt::format("config.json ties '{}' to '{}' (tie_word_embeddings), but the "
                                "checkpoint stores them as {} and {}",
                                printable(second.name), printable(first.name), second.shape.text(),
                                first.shape.text()),
         .found = second.shape.text(),
         .expected = first.shape.text()});
  }
  return findings;
}

std::optional<std::string> untied_head(const Plan& plan, std::string_view config) {
  std::set<std::string, std::less<>> names;
  for (const PlannedTarget& target : plan.targets) names.insert(target.name);
  return TiedHead(config).stored_in(names);
}

std::string untied_config(std::string_view config) {
  const auto untie = [](std::string_view key, std::string_view) {
    return key == member ? std::optional<std::string>("false") : std::nullopt;
  };
  std::string text = with_member(with_changes(config, untie), member, "false");
  if (!first_architecture(text).ends_with(composite)) return text;
  const std::string_view part = object_member(text, decoder);
  return part.empty() ? text : with_member(text, decoder, with_member(part, member, "false"));
}

}  // namespace loadstone
