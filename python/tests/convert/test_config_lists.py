"""The configs of a converted folder against its tensors, both read back from the files alone.

Everything that a config declares quantized must be quantized, and servers must quantize nothing
else. The matchers are those of compressed-tensors and ModelOpt's wildcards (fnmatch). Servers look
up a linear layer by its module, and a stack of experts by its module and by the weights of its
first expert.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from command import verified
from compressed_tensors.utils.match import match_name
from readback_cells import styles_of, written_encodings
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import loadstone

H = 64
ROLES = ("gate_proj", "up_proj", "down_proj")
MIXTRAL = ("w1", "w3", "w2")


def matrix(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).mul(0.05).bfloat16()


def attention(prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}self_attn.{each}_proj.weight": matrix(H, H) for each in "qkvo"}


def dense(prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}mlp.{role}.weight": matrix(H, H) for role in ROLES}


def stacked(prefix: str, suffix: str = "") -> dict[str, torch.Tensor]:
    return {
        f"{prefix}mlp.experts.gate_up_proj{suffix}": matrix(3, 2 * H, H),
        f"{prefix}mlp.experts.down_proj{suffix}": matrix(3, H, H),
        f"{prefix}mlp.gate.weight": matrix(3, H),
    }


def one_by_one(prefix: str, block: str, roles: tuple[str, ...]) -> dict[str, torch.Tensor]:
    experts = itertools.product(range(3), roles)
    made = {f"{prefix}{block}.experts.{e}.{role}.weight": matrix(H, H) for e, role in experts}
    return made | {f"{prefix}{block}.gate.weight": matrix(3, H)}


LAYOUTS: dict[str, tuple[str, Callable[[str], dict[str, torch.Tensor]]]] = {
    "dense": ("llama", dense),
    "tied": ("llama", dense),
    "stacks": ("qwen3_5_moe_text", stacked),
    "stacks of weights": ("qwen3_5_moe_text", lambda prefix: stacked(prefix, ".weight")),
    "experts": ("qwen3_moe", lambda prefix: one_by_one(prefix, "mlp", ROLES)),
    "mixtral": ("mixtral", lambda prefix: one_by_one(prefix, "block_sparse_moe", MIXTRAL)),
}
# The names of layers 1 and 10 share a prefix. The last layer is for multi-token prediction.
LAYERS = (
    "model.layers.0.",
    "model.layers.1.",
    "model.layers.10.",
    "model.layers.11.",
    "mtp.layers.0.",
)


def tensors_of(layout: str) -> dict[str, torch.Tensor]:
    block = LAYOUTS[layout][1]
    tensors = {
        "model.embed_tokens.weight": matrix(128, H),
        "lm_head.weight": matrix(128, H),
        "model.visual.blocks.0.attn.qkv.weight": matrix(H, H),
    }
    if layout == "tied":
        del tensors["lm_head.weight"]
    for prefix in LAYERS:
        tensors |= attention(prefix) | block(prefix)
        tensors[f"{prefix}input_layernorm.weight"] = matrix(H)
    return tensors


def checkpoint(folder: Path, layout: str) -> Path:
    folder.mkdir()
    save_file(tensors_of(layout), folder / "model.safetensors")
    config = {"model_type": LAYOUTS[layout][0], "num_hidden_layers": 11, "vocab_size": 128}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# Patterns of --include and --exclude.
CHOICES: dict[str, dict[str, Any]] = {
    "usual": {},
    "one layer less": {"exclude": r"layers\.1\."},
    "experts of a layer": {"exclude": r"layers\.1\..*experts"},
    "no experts": {"exclude": "experts"},
    "no attention": {"exclude": "self_attn"},
    "further layers": {"include": [r"^mtp\..*_proj"]},
    "further experts": {"include": [r"^mtp\..*experts"], "exclude": r"layers\.10\."},
    "routers": {"include": [r"\.gate\.weight"], "exclude": r"layers\.1\..*experts"},
    "head and pictures": {"include": ["^lm_head", "visual"]},
}
STYLES = {"compressed-tensors": "fp8-channel", "modelopt": "fp8-channel"}
MIXED = {r"self_attn": "fp8", "": "fp8-channel"}


def cells() -> list[tuple[str, str]]:
    """Return all pairs of a layout and a choice whose patterns all match tensors of the layout,
    because loadstone rejects other patterns."""
    return [
        (layout, choice)
        for layout in LAYOUTS
        for choice, options in CHOICES.items()
        if all(
            any(re.search(pattern, name) for name in tensors_of(layout))
            for pattern in [*options.get("include", []), options.get("exclude", "")]
        )
    ]


@dataclass(frozen=True)
class ConversionInput:
    """A layer that a server looks up in its config.

    Attributes:
        is_quantized: whether the files contain codes for the layer.
        name: the module's name.
    """

    is_quantized: bool
    name: str


def questions(tensors: Mapping[str, torch.Tensor]) -> list[ConversionInput]:
    """Return every layer that a server builds from the tensors of a folder."""
    asked = []
    codes = {n.removesuffix(".weight_scale") for n in tensors if n.endswith(".weight_scale")}
    stacks: dict[str, set[bool]] = {}
    if "lm_head.weight" not in tensors and "lm_head.weight_scale" not in tensors:
        # The head is tied to the embedding, but servers look it up as a linear layer.
        asked.append(ConversionInput(False, "lm_head"))
    for name, tensor in tensors.items():
        if tensor.dim() < 2 or name.endswith("_scale"):
            continue
        module = name.removesuffix(".weight")
        asked.append(ConversionInput(module in codes, module))
        prefix, infix, _ = module.partition(".experts.")
        if infix:
            stacks.setdefault(f"{prefix}.experts", set()).add(module in codes)
    for stack, found in stacks.items():
        (is_quantized,) = found
        asked += [ConversionInput(is_quantized, f"{stack}.0.{role}") for role in ROLES]
    return asked


def compressed_says(config: dict[str, Any], asked: ConversionInput) -> bool:
    section = config["quantization_config"]
    targets = [t for group in section["config_groups"].values() for t in group["targets"]]
    if any(match_name(asked.name, each) for each in section["ignore"]):
        return False
    return "Linear" in targets or any(match_name(asked.name, each) for each in targets)


def modelopt_says(section: dict[str, Any], asked: ConversionInput) -> bool:
    """Look up an expert by the module of its stack, and in a mixed config by any layer below it.

    vLLM, SGLang and TensorRT-LLM build one layer per stack.
    """
    stack, is_expert, _ = asked.name.partition(".experts.")
    name = f"{stack}.experts" if is_expert else asked.name
    layers = section.get("quantized_layers")
    patterns = section.get("ignore", section.get("exclude_modules", []))
    if any(fnmatch.fnmatchcase(each, p) for each in {name, asked.name} for p in patterns):
        return False
    if layers is None:
        return True
    return any(each == name or (is_expert and each.startswith(f"{name}.")) for each in layers)


def wrong_answers(folder: Path, style: str) -> list[str]:
    """Return the names of layers for which the config and the tensors disagree."""
    config = json.loads((folder / "config.json").read_text())
    asked = questions(load_file(folder / "model.safetensors"))
    assert any(each.is_quantized for each in asked)
    if style == "compressed-tensors":
        return [each.name for each in asked if compressed_says(config, each) != each.is_quantized]
    beside = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    sections = (config["quantization_config"], beside)
    return [
        each.name
        for section, each in itertools.product(sections, asked)
        if modelopt_says(section, each) != each.is_quantized
    ]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("layouts")
    return {name: checkpoint(folder / name, name) for name in LAYOUTS}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("layout", "choice"), cells())
@pytest.mark.parametrize("mixed", [False, True], ids=["one", "mixed"])
def test_configs_and_tensors_agree(
    sources: dict[str, Path], tmp_path: Path, layout: str, choice: str, style: str, mixed: bool
) -> None:
    quantize: Any = MIXED if mixed else STYLES[style]
    target = tmp_path / "out"
    loadstone.convert(sources[layout], target, quantize=quantize, style=style, **CHOICES[choice])
    assert wrong_answers(target, style) == []
    status, report = verified(target)
    assert status == 0, report["findings"]


@pytest.mark.parametrize("style", STYLES)
def test_a_list_that_lacks_a_stack_is_found(
    sources: dict[str, Path], tmp_path: Path, style: str
) -> None:
    """Control: servers quantize one layer's experts if the config does not exclude them."""
    target = tmp_path / "out"
    options = CHOICES["experts of a layer"]
    loadstone.convert(sources["stacks"], target, quantize="fp8-channel", style=style, **options)
    path = target / "config.json"
    config = json.loads(path.read_text())
    ignore = config["quantization_config"]["ignore"]
    kept = [
        each
        for each in ignore
        if "experts" not in each and "layers.1.mlp" not in each.replace("\\", "")
    ]
    assert len(kept) < len(ignore)
    config["quantization_config"]["ignore"] = kept
    path.write_text(json.dumps(config))
    assert set(wrong_answers(target, style)) >= {
        f"model.layers.1.mlp.experts.0.{role}" for role in ROLES
    }


# Other blocks that a layer has next to its experts, by model type.
SHARED = {
    "qwen3_moe": [],
    "mixtral": [],
    "qwen2_moe": ["shared_expert", "shared_expert_gate"],
    "deepseek_v3": ["shared_experts"],
}
BOTH_STYLES = [each for each in written_encodings() if {*STYLES} <= {*styles_of(each)}]


def mixture(folder: Path, model_type: str) -> Path:
    words = ("block_sparse_moe", MIXTRAL) if model_type == "mixtral" else ("mlp", ROLES)
    tensors = {"model.embed_tokens.weight": matrix(128, H), "lm_head.weight": matrix(128, H)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        tensors |= attention(prefix) | one_by_one(prefix, *words)
        for block in SHARED[model_type]:
            roles = [""] if block.endswith("gate") else [f".{role}" for role in ROLES]
            tensors |= {f"{prefix}mlp.{block}{role}.weight": matrix(H, H) for role in roles}
    tensors = {name: each.repeat(4, 4) for name, each in tensors.items()}  # several blocks of 128
    for tensor in tensors.values():
        # The maximum makes nvfp4's outer scale 2 ** -12, which has an inverse.
        tensor[0, 0] = 21 / 32
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def lists_of(folder: Path) -> dict[str, Any]:
    names = ("config.json", "hf_quant_config.json")
    return {
        name: json.loads((folder / name).read_text()) for name in names if (folder / name).is_file()
    }


@pytest.mark.parametrize("encoding", BOTH_STYLES)
@pytest.mark.parametrize("model_type", SHARED)
def test_a_repack_has_the_lists_of_a_quantization(
    encoding: str, model_type: str, tmp_path: Path
) -> None:
    """Scales of experts are matrices, but not layers. Control: each choice gives other lists."""
    source = mixture(tmp_path / "in", model_type)
    seen = []
    for choice in ("usual", "experts of a layer", "no experts", "no attention"):
        made = {}
        for style in STYLES:
            made[style] = tmp_path / f"{choice} {style}"
            loadstone.convert(
                source, made[style], quantize=encoding, style=style, **CHOICES[choice]
            )
        for style, before in itertools.product(STYLES, STYLES):
            target = tmp_path / f"{choice} {before} {style}"
            loadstone.convert(made[before], target, style=style)
            assert lists_of(target) == lists_of(made[style])
        seen.append(lists_of(made["modelopt"]))
    assert all(a != b for a, b in itertools.combinations(seen, 2))


@pytest.mark.parametrize(
    "options", [{"quantize": "fp8-channel", "style": "compressed-tensors"}, {"quantize": "nf4"}]
)
def test_a_tied_head_stays_the_embedding(tmp_path: Path, options: dict[str, str]) -> None:
    """Without a config entry for the head, transformers builds a quantized head without scales."""
    config = LlamaConfig(
        hidden_size=H,
        intermediate_size=H,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=128,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "in")
    loadstone.convert(tmp_path / "in", tmp_path / "out", **options)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert type(model.lm_head) is torch.nn.Linear
    assert dict(model.lm_head.named_parameters()).keys() == {"weight"}
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["model.layers.0.self_attn.q_proj.weight"].dtype != torch.bfloat16  # control
