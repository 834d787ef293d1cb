"""Maps a model's tensors to the original names, as the inverse of diffusers' converters.

A layout maps the state dict of a model and its configuration to the tensors of a file.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

State = dict[str, torch.Tensor]
Layout = Callable[[State, Mapping[str, Any]], State]
COMFY = "model.diffusion_model."  # prefix of names in files for tools that load a single file


@dataclasses.dataclass(frozen=True)
class Rules:
    """A layout that joins tensors, swaps halves, then renames.

    Attributes:
        renames: pairs of old and new substrings, replaced in order in ".NAME.".
        joins: tensors to concatenate along the first dimension, and the name of the result.
        swaps: patterns of names of tensors whose halves are swapped.
    """

    renames: tuple[tuple[str, str], ...]
    joins: tuple[tuple[tuple[str, ...], str], ...] = ()
    swaps: tuple[str, ...] = ()
    prefix: str = COMFY

    def __call__(self, state: State, config: Mapping[str, Any]) -> State:
        del config
        made = {}
        for name, tensor in self._joined(state).items():
            value = tensor
            if any(re.search(pattern, name) for pattern in self.swaps):
                value = torch.cat(list(reversed(tensor.chunk(2))))
            made[self.prefix + self.renamed(name)] = value
        return made

    def renamed(self, name: str) -> str:
        full = f".{name}."
        for old, new in self.renames:
            full = full.replace(old, new)
        return full[1:-1]

    def _joined(self, state: State) -> State:
        made = {}
        for name, tensor in state.items():
            full = f".{name}"
            for pieces, whole in self.joins:
                at = next((piece for piece in pieces if f".{piece}." in full), None)
                names = [name.replace(f"{at}.", f"{piece}.") for piece in pieces]
                if at is not None and names[-1] in state:
                    if at == pieces[0]:
                        joined = torch.cat([state[each] for each in names])
                        made[name.replace(f"{at}.", f"{whole}.")] = joined
                    break
            else:
                made[name] = tensor
        return made


def unchanged(state: State, config: Mapping[str, Any]) -> State:
    del config
    return dict(state)


def prefixed(state: State, config: Mapping[str, Any]) -> State:
    del config
    return {COMFY + name: tensor for name, tensor in state.items()}


# --- Stable Diffusion ----------------------------------------------------------------------------

_UNET_TOP = {
    "time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2",
    "conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2",
    "add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2",
}  # fmt: skip
_UNET_RESNET = Rules(
    (
        (".norm1.", ".in_layers.0."), (".conv1.", ".in_layers.2."),
        (".norm2.", ".out_layers.0."), (".conv2.", ".out_layers.3."),
        (".time_emb_proj.", ".emb_layers.1."), (".conv_shortcut.", ".skip_connection."),
    )
)  # fmt: skip


def ldm_unet(state: State, config: Mapping[str, Any]) -> State:
    return {COMFY + unet_name(name, config): tensor for name, tensor in state.items()}


def unet_name(name: str, config: Mapping[str, Any]) -> str:
    stem, leaf = name.rsplit(".", 1)
    if stem in _UNET_TOP:
        return f"{_UNET_TOP[stem]}.{leaf}"
    parts = name.split(".")
    per_block = config["layers_per_block"] + 1
    if parts[0] == "mid_block":
        rest = ".".join(parts[3:])
        if parts[1] == "attentions":
            return f"middle_block.1.{rest}"
        return f"middle_block.{2 * int(parts[2])}.{_UNET_RESNET.renamed(rest)}"
    block, kind, rest = int(parts[1]), parts[2], ".".join(parts[4:])
    is_down = parts[0] == "down_blocks"
    side = "input_blocks" if is_down else "output_blocks"
    at = per_block * block + int(parts[3]) + (1 if is_down else 0)
    if kind == "resnets":
        return f"{side}.{at}.0.{_UNET_RESNET.renamed(rest)}"
    if kind == "attentions":
        return f"{side}.{at}.1.{rest}"
    if is_down:
        return f"{side}.{per_block * (block + 1)}.0.op.{leaf}"
    place = 2 if "Attn" in config["up_block_types"][block] else 1
    return f"{side}.{per_block * (block + 1) - 1}.{place}.conv.{leaf}"


def ldm_vae(state: State, config: Mapping[str, Any]) -> State:
    last = len(config["block_out_channels"]) - 1
    made = {}
    for name, tensor in state.items():
        new, value = name, tensor
        for index in range(last + 1):
            down, up = f"encoder.down.{index}", f"decoder.up.{last - index}"
            for old, path, whole in (
                (f"encoder.down_blocks.{index}", down, "downsamplers.0"),
                (f"decoder.up_blocks.{index}", up, "upsamplers.0"),
            ):
                new = new.replace(f"{old}.resnets.", f"{path}.block.")
                new = new.replace(f"{old}.{whole}.", f"{path}.{whole.split('samplers')[0]}sample.")
        new = new.replace("mid_block.resnets.0", "mid.block_1")
        new = new.replace("mid_block.resnets.1", "mid.block_2")
        new = new.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")
        if "mid_block.attentions.0" in new:
            new = new.replace("mid_block.attentions.0", "mid.attn_1").replace("group_norm", "norm")
            new = new.replace("to_out.0", "proj_out").replace("to_", "")
            value = tensor[..., None, None] if tensor.dim() == 2 else tensor
        made[f"first_stage_model.{new}"] = value
    return made


# --- image transformers --------------------------------------------------------------------------

QKV = (("attn.to_q", "attn.to_k", "attn.to_v"), "attn.qkv")
ADDED_QKV = (("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), "attn.add_qkv")

_sd3 = Rules(
    (
        (".pos_embed.pos_embed.", ".pos_embed."), (".pos_embed.proj.", ".x_embedder.proj."),
        (".time_text_embed.timestep_embedder.linear_1.", ".t_embedder.mlp.0."),
        (".time_text_embed.timestep_embedder.linear_2.", ".t_embedder.mlp.2."),
        (".time_text_embed.text_embedder.linear_1.", ".y_embedder.mlp.0."),
        (".time_text_embed.text_embedder.linear_2.", ".y_embedder.mlp.2."),
        (".transformer_blocks.", ".joint_blocks."),
        (".attn.qkv.", ".x_block.attn.qkv."), (".attn2.qkv.", ".x_block.attn2.qkv."),
        (".attn.add_qkv.", ".context_block.attn.qkv."),
        (".attn.norm_q.", ".x_block.attn.ln_q."), (".attn.norm_k.", ".x_block.attn.ln_k."),
        (".attn2.norm_q.", ".x_block.attn2.ln_q."), (".attn2.norm_k.", ".x_block.attn2.ln_k."),
        (".attn.norm_added_q.", ".context_block.attn.ln_q."),
        (".attn.norm_added_k.", ".context_block.attn.ln_k."),
        (".attn.to_out.0.", ".x_block.attn.proj."), (".attn2.to_out.0.", ".x_block.attn2.proj."),
        (".attn.to_add_out.", ".context_block.attn.proj."),
        (".norm1.linear.", ".x_block.adaLN_modulation.1."),
        (".norm1_context.linear.", ".context_block.adaLN_modulation.1."),
        (".ff.net.0.proj.", ".x_block.mlp.fc1."), (".ff.net.2.", ".x_block.mlp.fc2."),
        (".ff_context.net.0.proj.", ".context_block.mlp.fc1."),
        (".ff_context.net.2.", ".context_block.mlp.fc2."),
        (".proj_out.", ".final_layer.linear."),
        (".norm_out.linear.", ".final_layer.adaLN_modulation.1."),
    ),
    joins=(QKV, ADDED_QKV, (("attn2.to_q", "attn2.to_k", "attn2.to_v"), "attn2.qkv")),
    swaps=(r"^norm_out\.linear",),
)  # fmt: skip


def sd3(state: State, config: Mapping[str, Any]) -> State:
    last = rf"^transformer_blocks\.{config['num_layers'] - 1}\.norm1_context"
    return dataclasses.replace(_sd3, swaps=(*_sd3.swaps, last))(state, config)


_FLUX_RENAMES = (
    (".time_text_embed.timestep_embedder.linear_1.", ".time_in.in_layer."),
    (".time_text_embed.timestep_embedder.linear_2.", ".time_in.out_layer."),
    (".time_text_embed.text_embedder.linear_1.", ".vector_in.in_layer."),
    (".time_text_embed.text_embedder.linear_2.", ".vector_in.out_layer."),
    (".time_text_embed.guidance_embedder.linear_1.", ".guidance_in.in_layer."),
    (".time_text_embed.guidance_embedder.linear_2.", ".guidance_in.out_layer."),
    (".context_embedder.", ".txt_in."), (".x_embedder.", ".img_in."),
    (".norm1.linear.", ".img_mod.lin."), (".norm1_context.linear.", ".txt_mod.lin."),
    (".attn.qkv.", ".img_attn.qkv."), (".attn.add_qkv.", ".txt_attn.qkv."),
    (".attn.norm_added_q.weight.", ".txt_attn.norm.query_norm.scale."),
    (".attn.norm_added_k.weight.", ".txt_attn.norm.key_norm.scale."),
    (".attn.to_out.0.", ".img_attn.proj."), (".attn.to_add_out.", ".txt_attn.proj."),
    (".ff.net.0.proj.", ".img_mlp.0."), (".ff.net.2.", ".img_mlp.2."),
    (".ff_context.net.0.proj.", ".txt_mlp.0."), (".ff_context.net.2.", ".txt_mlp.2."),
    (".norm.linear.", ".modulation.lin."),
    (".norm_out.linear.", ".final_layer.adaLN_modulation.1."),
)  # fmt: skip
_flux = Rules(
    _FLUX_RENAMES,
    joins=(QKV, ADDED_QKV),
    swaps=(r"^norm_out\.linear",),
    prefix="",
)


def single_fused(state: State) -> State:
    """Fuse ``proj_mlp`` with ``attn``'s projections; ``Rules`` cannot, as the stems differ."""
    made = {}
    for name, tensor in state.items():
        block, _, rest = name.partition(".")
        if rest.startswith("attn.to_q."):
            leaf = rest.removeprefix("attn.to_q.")
            pieces = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
            whole = torch.cat([state[f"{block}.{piece}.{leaf}"] for piece in pieces])
            made[f"{block}.linear1.{leaf}"] = whole
        elif not rest.startswith(("attn.to_k.", "attn.to_v.", "proj_mlp.")):
            made[name] = tensor
    return made


def flux(state: State, config: Mapping[str, Any]) -> State:
    """Map Flux and Chroma, whose single blocks fuse attention and the first MLP layer."""
    head = "single_transformer_blocks."
    single = {name.removeprefix(head): state[name] for name in state if name.startswith(head)}
    fused = {name: tensor for name, tensor in state.items() if not name.startswith(head)}
    fused |= {head + name: tensor for name, tensor in single_fused(single).items()}
    made = {}
    for name, tensor in _flux(fused, config).items():
        is_single = name.startswith("single_")
        new = re.sub(r"^(single_)?transformer_blocks\.", r"\1blocks.", name)
        new = new if is_single else re.sub(r"^blocks\.", "double_blocks.", new)
        for short, full in (("q", "query_norm"), ("k", "key_norm")):
            path = f"norm.{full}.scale" if is_single else f"img_attn.norm.{full}.scale"
            new = new.replace(f"attn.norm_{short}.weight", path)
        new = new.replace("proj_out.", "linear2." if is_single else "final_layer.linear.")
        if new.startswith("distilled_guidance_layer"):
            new = new.replace("linear_1", "in_layer").replace("linear_2", "out_layer")
            new = re.sub(r"(norms\.\d+)\.weight", r"\1.scale", new)
        made[COMFY + new] = tensor
    return made


auraflow = Rules(
    (
        (".time_step_proj.linear_1.", ".t_embedder.mlp.0."),
        (".time_step_proj.linear_2.", ".t_embedder.mlp.2."),
        (".context_embedder.", ".cond_seq_linear."), (".proj_out.", ".final_linear."),
        (".norm_out.linear.", ".modF.1."), (".pos_embed.pos_embed.", ".positional_encoding."),
        (".pos_embed.proj.", ".init_x_linear."),
        (".linear_1.", ".c_fc1."), (".linear_2.", ".c_fc2."), (".out_projection.", ".c_proj."),
        (".ff_context.", ".mlpC."), (".norm1_context.linear.", ".modC.1."),
        (".attn.add_q_proj.", ".attn.w1q."), (".attn.add_k_proj.", ".attn.w1k."),
        (".attn.add_v_proj.", ".attn.w1v."), (".attn.to_add_out.", ".attn.w1o."),
    ),
    swaps=(r"^norm_out\.linear",),
    prefix="",
)  # fmt: skip


def auraflow_blocks(state: State, config: Mapping[str, Any]) -> State:
    made = {}
    for name, tensor in auraflow(state, config).items():
        is_single = name.startswith("single_")
        number, mlp, mod = ("1", "mlp", "modCX") if is_single else ("2", "mlpX", "modX")
        new = name.replace("single_transformer_blocks.", "single_layers.")
        new = new.replace("joint_transformer_blocks.", "double_layers.")
        new = new.replace(".ff.", f".{mlp}.").replace(".norm1.linear.", f".{mod}.1.")
        new = new.replace(".to_out.0.", f".w{number}o.")
        made[re.sub(r"\.to_([qkv])\.", rf".w{number}\1.", new)] = tensor
    return made


_lumina2 = Rules(
    (
        (".norm_out.linear_1.", ".final_layer.adaLN_modulation.1."),
        (".norm_out.linear_2.", ".final_layer.linear."),
        (".time_caption_embed.caption_embedder.", ".cap_embedder."),
        (".time_caption_embed.timestep_embedder.linear_1.", ".t_embedder.mlp.0."),
        (".time_caption_embed.timestep_embedder.linear_2.", ".t_embedder.mlp.2."),
        (".norm1.norm.", ".attention_norm1."), (".norm1.linear.", ".adaLN_modulation.1."),
        (".norm1.", ".attention_norm1."), (".norm2.", ".attention_norm2."),
        (".attn.", ".attention."), (".to_out.0.", ".out."),
        (".norm_q.", ".q_norm."), (".norm_k.", ".k_norm."),
        (".linear_1.", ".w1."), (".linear_2.", ".w2."), (".linear_3.", ".w3."),
    ),
    joins=(QKV,),
    prefix="",
)  # fmt: skip


def lumina2(state: State, config: Mapping[str, Any]) -> State:
    """Map Lumina 2; the file also contains a norm that the model does not use."""
    return _lumina2(state, config) | {"norm_final.weight": torch.ones(config["hidden_size"])}


z_image = Rules(
    (
        (".all_final_layer.2-1.", ".final_layer."), (".all_x_embedder.2-1.", ".x_embedder."),
        (".attention.to_out.0.", ".attention.out."), (".attention.norm_k.", ".attention.k_norm."),
        (".attention.norm_q.", ".attention.q_norm."),
    ),
    joins=((("attention.to_q", "attention.to_k", "attention.to_v"), "attention.qkv"),),
)  # fmt: skip

_sana = Rules(
    (
        (".patch_embed.", ".x_embedder."),
        (".time_embed.emb.timestep_embedder.linear_1.", ".t_embedder.mlp.0."),
        (".time_embed.emb.timestep_embedder.linear_2.", ".t_embedder.mlp.2."),
        (".time_embed.linear.", ".t_block.1."),
        (".caption_projection.linear_1.", ".y_embedder.y_proj.fc1."),
        (".caption_projection.linear_2.", ".y_embedder.y_proj.fc2."),
        (".caption_norm.", ".attention_y_norm."), (".transformer_blocks.", ".blocks."),
        (".attn1.qkv.", ".attn.qkv."), (".attn1.to_out.0.", ".attn.proj."),
        (".attn2.to_q.", ".cross_attn.q_linear."), (".attn2.kv.", ".cross_attn.kv_linear."),
        (".attn2.to_out.0.", ".cross_attn.proj."),
        (".ff.conv_inverted.", ".mlp.inverted_conv.conv."),
        (".ff.conv_depth.", ".mlp.depth_conv.conv."), (".ff.conv_point.", ".mlp.point_conv.conv."),
        (".proj_out.", ".final_layer.linear."),
    ),
    joins=(
        (("attn1.to_q", "attn1.to_k", "attn1.to_v"), "attn1.qkv"),
        (("attn2.to_k", "attn2.to_v"), "attn2.kv"),
    ),
    prefix="",
)  # fmt: skip


def sana(state: State, config: Mapping[str, Any]) -> State:
    """Map Sana; the file also contains two tensors that the converter drops."""
    made = _sana(state, config)
    made["final_layer.scale_shift_table"] = made.pop("scale_shift_table")
    extra = {"pos_embed": torch.randn(1, 4, 8), "y_embedder.y_embedding": torch.randn(4, 8)}
    return {COMFY + name: tensor for name, tensor in (made | extra).items()}
