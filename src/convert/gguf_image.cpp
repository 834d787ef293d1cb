#include "convert/gguf_image.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>

#include "base/natural_order.h"

namespace loadstone {

namespace {

using Names = std::span<const std::string_view>;

// All of these tensors are there.
using Mark = Names;

}  // namespace

struct ImageModel {
  std::string_view architecture;
  std::span<const Mark> marks;  // one of them tells the model
  Names plain;                  // parts of names that are never quantized
  Names wide;                   // parts of names that stay F32
};

namespace {

constexpr std::string_view flux_names[] = {"double_blocks.0.img_attn.proj.weight"};
constexpr Mark flux_marks[] = {flux_names};
constexpr std::string_view in_and_out[] = {"txt_in.",    "img_in.",      "time_in.",
                                           "vector_in.", "guidance_in.", "final_layer."};

constexpr std::string_view sd3_names[] = {"joint_blocks.0.x_block.attn.qkv.weight"};
constexpr Mark sd3_marks[] = {sd3_names};
constexpr std::string_view sd3_plain[] = {"final_layer.", "time_text_embed.", "context_embedder.",
                                          "t_embedder.",  "y_embedder.",      "x_embedder.",
                                          "pos_embed"};

constexpr std::string_view aura_names[] = {"double_layers.3.modX.1.weight"};
constexpr Mark aura_marks[] = {aura_names};
constexpr std::string_view aura_plain[] = {
    "t_embedder.",   "init_x_linear.",      "modF.1.weight",  "cond_seq_linear.weight",
    "final_linear.", "positional_encoding", "register_tokens"};

constexpr std::string_view hidream_names[] = {
    "caption_projection.0.linear.weight",
    "double_stream_blocks.0.block.ff_i.shared_experts.w3.weight"};
constexpr Mark hidream_marks[] = {hidream_names};
constexpr std::string_view hidream_plain[] = {"p_embedder.",       "t_embedder.",
                                              "x_embedder.",       "final_layer.",
                                              ".ff_i.gate.weight", "caption_projection."};
constexpr std::string_view hidream_wide[] = {".ff_i.gate.weight", "img_emb.emb_pos"};

constexpr std::string_view cosmos_names[] = {"blocks.0.mlp.layer1.weight",
                                             "blocks.0.adaln_modulation_cross_attn.1.weight"};
constexpr Mark cosmos_marks[] = {cosmos_names};
constexpr std::string_view cosmos_plain[] = {"p_embedder.", "t_embedder.",   "t_embedding_norm.",
                                             "x_embedder.", "pos_embedder.", "final_layer."};
constexpr std::string_view cosmos_wide[] = {"pos_embedder"};

constexpr std::string_view ltxv_names[] = {"adaln_single.emb.timestep_embedder.linear_2.weight",
                                           "transformer_blocks.27.scale_shift_table",
                                           "caption_projection.linear_2.weight"};
constexpr Mark ltxv_marks[] = {ltxv_names};
constexpr std::string_view ltxv_plain[] = {"adaln_single.", "caption_projection.", "patchify_proj.",
                                           "proj_out.", "scale_shift_table"};
constexpr std::string_view ltxv_wide[] = {"scale_shift_table"};

constexpr std::string_view hyvid_names[] = {
    "double_blocks.0.img_attn_proj.weight",
    "txt_in.individual_token_refiner.blocks.1.self_attn_qkv.weight"};
constexpr Mark hyvid_marks[] = {hyvid_names};

constexpr std::string_view wan_names[] = {"blocks.0.self_attn.norm_q.weight",
                                          "text_embedding.2.weight", "head.modulation"};
constexpr Mark wan_marks[] = {wan_names};
constexpr std::string_view wan_plain[] = {"modulation.",
                                          "patch_embedding.",
                                          "text_embedding.",
                                          "time_projection.",
                                          "time_embedding.",
                                          "img_emb.",
                                          "head."};
constexpr std::string_view wan_wide[] = {".modulation"};

constexpr std::string_view qwen_image_names[] = {"txt_norm.weight",
                                                 "transformer_blocks.0.img_mod.1.weight",
                                                 "transformer_blocks.0.txt_mlp.net.2.weight"};
constexpr Mark qwen_image_marks[] = {qwen_image_names};
constexpr std::string_view qwen_image_plain[] = {"img_in.", "txt_in.", "time_text_embed.",
                                                 "norm_out."};

constexpr std::string_view sdxl_blocks[] = {
    "input_blocks.3.0.op.weight", "input_blocks.6.0.op.weight", "output_blocks.2.2.conv.weight",
    "output_blocks.5.2.conv.weight"};
constexpr std::string_view sdxl_library[] = {"down_blocks.0.downsamplers.0.conv.weight",
                                             "add_embedding.linear_1.weight"};
constexpr std::string_view sdxl_label[] = {"label_emb.0.0.weight"};
constexpr Mark sdxl_marks[] = {sdxl_library, sdxl_blocks, sdxl_label};
constexpr std::string_view sd1_blocks[] = {
    "input_blocks.3.0.op.weight",    "input_blocks.6.0.op.weight",
    "input_blocks.9.0.op.weight",    "output_blocks.2.1.conv.weight",
    "output_blocks.5.2.conv.weight", "output_blocks.8.2.conv.weight"};
constexpr std::string_view sd1_library[] = {"down_blocks.0.downsamplers.0.conv.weight"};
constexpr Mark sd1_marks[] = {sd1_library, sd1_blocks};
constexpr std::string_view unet_plain[] = {
    "class_embedding.", "time_embedding.", "add_embedding.", "time_embed.",
    "label_emb.",       "conv_in.",        "conv_out.",      "input_blocks.0.0.weight"};

constexpr std::string_view lumina2_names[] = {"cap_embedder.1.weight",
                                              "context_refiner.0.attention.qkv.weight"};
constexpr Mark lumina2_marks[] = {lumina2_names};
constexpr std::string_view lumina2_plain[] = {"t_embedder.",      "x_embedder.",
                                              "final_layer.",     "cap_embedder.",
                                              "context_refiner.", "noise_refiner."};

// The first that is recognised counts.
constexpr ImageModel image_models[] = {
    {"flux", flux_marks, in_and_out, {}},
    {"sd3", sd3_marks, sd3_plain, {}},
    {"aura", aura_marks, aura_plain, {}},
    {"hidream", hidream_marks, hidream_plain, hidream_wide},
    {"cosmos", cosmos_marks, cosmos_plain, cosmos_wide},
    {"ltxv", ltxv_marks, ltxv_plain, ltxv_wide},
    {"hyvid", hyvid_marks, in_and_out, {}},
    {"wan", wan_marks, wan_plain, wan_wide},
    {"qwen_image", qwen_image_marks, qwen_image_plain, {}},
    {"sdxl", sdxl_marks, unet_plain, {}},
    {"sd1", sd1_marks, unet_plain, {}},
    {"lumina2", lumina2_marks, lumina2_plain, {}},
};

// Whole names, where a part would say too much.
constexpr std::string_view plain_image_names[] = {"proj_out.weight", "out.2.weight"};

// Names of diffusers for models whose own checkpoints fuse queries, keys and values.
constexpr std::string_view flux_unfused[] = {"transformer_blocks.0.attn.norm_added_k.weight"};
constexpr std::string_view sd3_unfused[] = {"transformer_blocks.0.attn.add_q_proj.weight"};
constexpr std::string_view aura_unfused[] = {
    "joint_transformer_blocks.3.ff_context.out_projection.weight"};
constexpr Mark unfused_marks[] = {flux_unfused, sd3_unfused, aura_unfused};

// ComfyUI takes it away.
constexpr std::string_view comfy_prefix = "model.diffusion_model.";

// Matrices with fewer elements are not worth a block.
constexpr std::uint64_t small_elements_max = 1024;

// Dims without leading ones, which are none in ggml.
std::ptrdiff_t ggml_dims(const Shape& shape) noexcept {
  const auto& extents = shape.extents();
  const auto first = std::ranges::find_if(extents, [](std::uint64_t each) { return each != 1; });
  return extents.end() - first;
}

bool are_there(Mark mark, const Catalog& catalog) {
  return std::ranges::all_of(mark, [&](std::string_view name) {
    return catalog.find(name) || catalog.find(std::string(comfy_prefix).append(name));
  });
}

// ---- mixes

enum class Part : std::uint8_t { value, qkv, down, other };

Part part_of(std::string_view name) noexcept {
  constexpr std::string_view values[] = {"attn_v.weight",    ".to_v.weight",
                                         ".v.weight",        ".attn.w1v.weight",
                                         ".attn.w2v.weight", "_attn.v_proj.weight"};
  constexpr std::string_view fused[] = {"attn_qkv.weight", "attn.qkv.weight",
                                        "attention.qkv.weight"};
  constexpr std::string_view downs[] = {"ffn_down",
                                        ".ffn.2.weight",
                                        ".ff.net.2.weight",
                                        ".mlp.layer2.weight",
                                        ".adaln_modulation_mlp.2.weight",
                                        ".feed_forward.w2.weight"};
  if (has_any(name, values)) return Part::value;
  if (has_any(name, fused)) return Part::qkv;
  const bool is_expert = name.find("experts.") != std::string_view::npos &&
                         name.find(".w2.weight") != std::string_view::npos;
  return is_expert || has_any(name, downs) ? Part::down : Part::other;
}

struct PartRule {
  Part part;
  Mix mix;
  std::uint64_t first;  // of how many tensors of this part
  BlockFormat type;
};
constexpr std::uint64_t all_tensors = std::numeric_limits<std::uint64_t>::max();

// The first that fits counts; a tensor that none fits has the type of the mix.
constexpr PartRule part_rules[] = {
    {Part::value, Mix::q2_k, all_tensors, BlockFormat::q3_k},
    {Part::value, Mix::q3_k_m, 2, BlockFormat::q5_k},
    {Part::value, Mix::q3_k_m, all_tensors, BlockFormat::q4_k},
    {Part::value, Mix::q3_k_l, all_tensors, BlockFormat::q5_k},
    {Part::value, Mix::q4_k_s, 4, BlockFormat::q5_k},
    {Part::value, Mix::q4_k_m, all_tensors, BlockFormat::q6_k},
    {Part::value, Mix::q5_k_m, all_tensors, BlockFormat::q6_k},
    {Part::qkv, Mix::q3_k_m, all_tensors, BlockFormat::q4_k},
    {Part::qkv, Mix::q3_k_l, all_tensors, BlockFormat::q4_k},
    {Part::qkv, Mix::q4_k_m, all_tensors, BlockFormat::q5_k},
    {Part::qkv, Mix::q5_k_m, all_tensors, BlockFormat::q6_k},
    {Part::down, Mix::q3_k_m, all_tensors, BlockFormat::q4_k},
    {Part::down, Mix::q3_k_l, all_tensors, BlockFormat::q5_k},
    {Part::down, Mix::q4_k_s, all_tensors, BlockFormat::q5_k},
    {Part::down, Mix::q4_k_m, all_tensors, BlockFormat::q6_k},
    {Part::down, Mix::q5_k_m, all_tensors, BlockFormat::q6_k},
    {Part::down, Mix::q4_0, all_tensors, BlockFormat::q4_1},
    {Part::down, Mix::q5_0, all_tensors, BlockFormat::q5_1},
};

}  // namespace

const ImageModel* find_image_model(std::string_view architecture) noexcept {
  const auto* const found =
      std::ranges::find(image_models, architecture, &ImageModel::architecture);
  return found == std::end(image_models) ? nullptr : found;
}

const ImageModel* image_model(const Metadata& metadata) {
  const auto named = metadata.find("general.architecture");
  if (named == metadata.end()) return nullptr;
  const auto* const architecture = std::get_if<std::string>(&named->second.value);
  return architecture == nullptr ? nullptr : find_image_model(*architecture);
}

const ImageModel* recognised_image_model(const Catalog& catalog) {
  const auto is_it = [&](const ImageModel& model) {
    return std::ranges::any_of(model.marks, [&](Mark mark) { return are_there(mark, catalog); });
  };
  const auto* const found = std::ranges::find_if(image_models, is_it);
  return found == std::end(image_models) ? nullptr : found;
}

bool has_unfused_names(const Catalog& catalog) {
  return std::ranges::any_of(unfused_marks, [&](Mark mark) { return are_there(mark, catalog); });
}

std::string_view architecture(const ImageModel& model) noexcept { return model.architecture; }

bool is_image_mixed(const ImageModel& model, std::string_view name, const Shape& shape) noexcept {
  if (ggml_dims(shape) != 2 || !name.ends_with("weight")) return false;
  if (std::ranges::find(plain_image_names, name) != std::end(plain_image_names)) return false;
  return !has_any(name, model.plain) && !is_wide(model, name, shape);
}

bool is_wide(const ImageModel& model, std::string_view name, const Shape& shape) noexcept {
  return shape.rank() <= 1 || shape.numel().value_or(0) <= small_elements_max ||
         has_any(name, model.wide);
}

std::vector<Encoding> image_types(Mix mix, std::span<const MixTensor> tensors) {
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, natural_less, [&](std::size_t i) { return tensors[i].name; });
  std::uint64_t values = 0;
  std::vector<Encoding> types(tensors.size(), info(mix).type);
  for (const std::size_t i : order) {
    const MixTensor& tensor = tensors[i];
    const Part part = part_of(tensor.name);
    const std::uint64_t index = part == Part::value ? values++ : 0;
    const auto* const rule = std::ranges::find_if(part_rules, [&](const PartRule& each) {
      return each.part == part && each.mix == mix && index < each.first;
    });
    if (rule != std::end(part_rules)) types[i] = rule->type;
    types[i] = fitting_type(tensor.asked.value_or(types[i]), *tensor.shape);
  }
  return types;
}

}  // namespace loadstone
