#include "convert/choose/gguf_image.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>

#include "base/natural_order.h"
#include "base/words.h"
#include "convert/choose/gguf_mix.h"
#include "formats/metadata.h"

namespace loadstone {

namespace {

constexpr std::string_view in_and_out =
    "txt_in. img_in. time_in. vector_in. guidance_in. final_layer.";
constexpr std::string_view unet_plain =
    "class_embedding. time_embedding. add_embedding. time_embed. label_emb. conv_in. conv_out. "
    "input_blocks.0.0.weight";

// The first model whose marks match wins.
constexpr ImageModel image_models[] = {
    {"flux", {"double_blocks.0.img_attn.proj.weight"}, in_and_out, {}},
    {"sd3",
     {"joint_blocks.0.x_block.attn.qkv.weight"},
     "final_layer. time_text_embed. context_embedder. t_embedder. y_embedder. x_embedder. "
     "pos_embed",
     {}},
    {"aura",
     {"double_layers.3.modX.1.weight"},
     "t_embedder. init_x_linear. modF.1.weight cond_seq_linear.weight final_linear. "
     "positional_encoding register_tokens",
     {}},
    {"hidream",
     {"caption_projection.0.linear.weight "
      "double_stream_blocks.0.block.ff_i.shared_experts.w3.weight"},
     "p_embedder. t_embedder. x_embedder. final_layer. .ff_i.gate.weight caption_projection.",
     ".ff_i.gate.weight img_emb.emb_pos"},
    {"cosmos",
     {"blocks.0.mlp.layer1.weight blocks.0.adaln_modulation_cross_attn.1.weight"},
     "p_embedder. t_embedder. t_embedding_norm. x_embedder. pos_embedder. final_layer.",
     "pos_embedder"},
    {"ltxv",
     {"adaln_single.emb.timestep_embedder.linear_2.weight "
      "transformer_blocks.27.scale_shift_table caption_projection.linear_2.weight"},
     "adaln_single. caption_projection. patchify_proj. proj_out. scale_shift_table",
     "scale_shift_table"},
    {"hyvid",
     {"double_blocks.0.img_attn_proj.weight "
      "txt_in.individual_token_refiner.blocks.1.self_attn_qkv.weight"},
     in_and_out,
     {}},
    {"wan",
     {"blocks.0.self_attn.norm_q.weight text_embedding.2.weight head.modulation"},
     "modulation. patch_embedding. text_embedding. time_projection. time_embedding. img_emb. head. "
     "condition_embedder.",
     ".modulation scale_shift_table"},
    {"qwen_image",
     {"txt_norm.weight transformer_blocks.0.img_mod.1.weight "
      "transformer_blocks.0.txt_mlp.net.2.weight"},
     "img_in. txt_in. time_text_embed. norm_out.",
     {}},
    {"sdxl",
     {"down_blocks.0.downsamplers.0.conv.weight add_embedding.linear_1.weight",
      "input_blocks.3.0.op.weight input_blocks.6.0.op.weight output_blocks.2.2.conv.weight "
      "output_blocks.5.2.conv.weight",
      "label_emb.0.0.weight"},
     unet_plain,
     {}},
    {"sd1",
     {"down_blocks.0.downsamplers.0.conv.weight",
      "input_blocks.3.0.op.weight input_blocks.6.0.op.weight input_blocks.9.0.op.weight "
      "output_blocks.2.1.conv.weight output_blocks.5.2.conv.weight output_blocks.8.2.conv.weight"},
     unet_plain,
     {}},
    {"lumina2",
     {"cap_embedder.1.weight context_refiner.0.attention.qkv.weight"},
     "t_embedder. x_embedder. final_layer. cap_embedder. context_refiner. noise_refiner.",
     {}},
};

// Whole names, because a part of a name would match too many tensors.
constexpr std::string_view plain_image_names = "proj_out.weight out.2.weight";

// Tensor names of diffusers for models whose original checkpoints fuse queries, keys and values.
constexpr std::string_view unfused_marks =
    "transformer_blocks.0.attn.norm_added_k.weight transformer_blocks.0.attn.add_q_proj.weight "
    "joint_transformer_blocks.3.ff_context.out_projection.weight";

// Prefix that ComfyUI removes from tensor names.
constexpr std::string_view comfy_prefix = "model.diffusion_model.";

// Tensors with at most this many elements stay F32.
constexpr std::uint64_t small_elements_max = 1024;

// Returns the number of dims without leading dims of 1, which ggml does not count.
std::ptrdiff_t ggml_dims(const Shape& shape) noexcept {
  const auto& extents = shape.extents();
  const auto first = std::ranges::find_if(extents, [](std::uint64_t each) { return each != 1; });
  return extents.end() - first;
}

bool is_there(std::string_view name, const Catalog& catalog) {
  return catalog.find(name) || catalog.find(std::string(comfy_prefix).append(name));
}

// ---- mixes

enum class Part : std::uint8_t { value, qkv, down, other };

Part part_of(std::string_view name) noexcept {
  constexpr std::string_view values =
      "attn_v.weight .to_v.weight .v.weight .attn.w1v.weight .attn.w2v.weight _attn.v_proj.weight";
  constexpr std::string_view fused = "attn_qkv.weight attn.qkv.weight attention.qkv.weight";
  constexpr std::string_view downs =
      "ffn_down .ffn.2.weight .ff.net.2.weight .mlp.layer2.weight .adaln_modulation_mlp.2.weight "
      ".feed_forward.w2.weight";
  if (has_word(name, values)) return Part::value;
  if (has_word(name, fused)) return Part::qkv;
  const bool is_expert = name.find("experts.") != std::string_view::npos &&
                         name.find(".w2.weight") != std::string_view::npos;
  return is_expert || has_word(name, downs) ? Part::down : Part::other;
}

struct PartRule {
  Part part;
  std::string_view mixes;
  std::uint64_t first;  // the rule applies to the first `first` tensors of the part
  BlockFormat type;
};
constexpr std::uint64_t all_tensors = std::numeric_limits<std::uint64_t>::max();

// The first match wins; a tensor without a match has the type of the mix.
constexpr PartRule part_rules[] = {
    {Part::value, "q2_k", all_tensors, BlockFormat::q3_k},
    {Part::value, "q3_k_m", 2, BlockFormat::q5_k},
    {Part::value, "q3_k_m", all_tensors, BlockFormat::q4_k},
    {Part::value, "q3_k_l", all_tensors, BlockFormat::q5_k},
    {Part::value, "q4_k_s", 4, BlockFormat::q5_k},
    {Part::value, "q4_k_m q5_k_m", all_tensors, BlockFormat::q6_k},
    {Part::qkv, "q3_k_m q3_k_l", all_tensors, BlockFormat::q4_k},
    {Part::qkv, "q4_k_m", all_tensors, BlockFormat::q5_k},
    {Part::qkv, "q5_k_m", all_tensors, BlockFormat::q6_k},
    {Part::down, "q3_k_m", all_tensors, BlockFormat::q4_k},
    {Part::down, "q3_k_l q4_k_s", all_tensors, BlockFormat::q5_k},
    {Part::down, "q4_k_m q5_k_m", all_tensors, BlockFormat::q6_k},
    {Part::down, "q4_0", all_tensors, BlockFormat::q4_1},
    {Part::down, "q5_0", all_tensors, BlockFormat::q5_1},
};

}  // namespace

const ImageModel* find_image_model(std::string_view architecture) noexcept {
  const auto* const found =
      std::ranges::find(image_models, architecture, &ImageModel::architecture);
  return found == std::end(image_models) ? nullptr : found;
}

std::vector<std::string> image_architectures() {
  std::vector<std::string> names;
  for (const ImageModel& model : image_models) names.emplace_back(model.architecture);
  return names;
}

const ImageModel* image_model(const Metadata& metadata) {
  const std::string* const architecture = find_text(metadata, "general.architecture");
  return architecture == nullptr ? nullptr : find_image_model(*architecture);
}

const ImageModel* recognised_image_model(const Catalog& catalog) {
  const auto is_it = [&](const ImageModel& model) {
    return std::ranges::any_of(model.marks, [&](std::string_view mark) {
      const auto is_lacking = [&](std::string_view name) { return !is_there(name, catalog); };
      return !mark.empty() && !any_word(mark, is_lacking);
    });
  };
  const auto* const found = std::ranges::find_if(image_models, is_it);
  return found == std::end(image_models) ? nullptr : found;
}

bool has_unfused_names(const Catalog& catalog) {
  return any_word(unfused_marks, [&](std::string_view name) { return is_there(name, catalog); });
}

bool is_image_mixed(const ImageModel& model, std::string_view name, const Shape& shape) noexcept {
  if (ggml_dims(shape) != 2 || !name.ends_with("weight")) return false;
  if (is_word(name, plain_image_names)) return false;
  return !has_word(name, model.plain) && !is_wide(model, name, shape);
}

bool is_wide(const ImageModel& model, std::string_view name, const Shape& shape) noexcept {
  return shape.rank() <= 1 || ggml_dims(shape) > 2 ||
         shape.numel().value_or(0) <= small_elements_max || has_word(name, model.wide);
}

std::vector<Encoding> image_types(const Mix& mix, std::span<const MixTensor> tensors) {
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, natural_less, [&](std::size_t i) { return tensors[i].name; });
  std::uint64_t values = 0;
  std::vector<Encoding> types(tensors.size(), mix.type);
  for (const std::size_t i : order) {
    const MixTensor& tensor = tensors[i];
    const Part part = part_of(tensor.name);
    const std::uint64_t index = part == Part::value ? values++ : 0;
    const auto* const rule = std::ranges::find_if(part_rules, [&](const PartRule& each) {
      return each.part == part && index < each.first && is_word(mix.name, each.mixes);
    });
    if (rule != std::end(part_rules)) types[i] = rule->type;
    types[i] = fitting_type(tensor.asked.value_or(types[i]), *tensor.shape);
  }
  return types;
}

}  // namespace loadstone
