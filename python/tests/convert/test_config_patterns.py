"""The patterns in the configs of mixed outputs select exactly the modules of their group.

The matchers are those of compressed-tensors and, for wildcards, fnmatch. vLLM and TensorRT-LLM look
up experts in `quantized_layers` by the module that contains them, and other layers by their names.
"""

from __future__ import annotations

import fnmatch
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import output, verified
from compressed_tensors.utils.match import is_match
from safetensors.torch import save_file

import loadstone

LAYERS = (0, 1, 2, 10, 11, 100)  # some are prefixes of others
EXPERTS = range(12)
ODD = [
    "Linear",
    "re:.*",
    "layers.1",
    "layers.10",
    "model.layers.1.mlp.gate",
    "model.layers.1.mlp.gate_proj",
    "model.layers.1.mlp.gate.proj",
    "draft.model.layers.1.self_attn.q_proj",
    "model.layers.01.self_attn.q_proj",
    "model.layers.1.self_attn.q_proj.inner",
    "model.layers.1.a+b",
    "model.layers.1.aab",
    "model.layers.1.(x|y)[0]*?",
    "model.layers.\u0663.self_attn.q_proj",
    "model.layers.1.caf\u00e9",
    "model.layers.1..empty",
    "model.layers.1.self_attn_q_proj",
    "model.layers.1.mlp.experts_0_w1",
]
GRID = [
    f"{prefix}layers.{layer}.{name}"
    for prefix in ("model.", "model.vision.")
    for layer in LAYERS
    for name in (
        *(f"self_attn.{each}_proj" for each in "qkvo"),
        *(f"mlp.experts.{e}.{role}" for e in EXPERTS for role in ("w1", "w2", "w3")),
    )
]
Select = Callable[[str], bool]


def key_of(kind: str, name: str) -> str:
    """Return the part of the name that decides whether a module is selected."""
    parts = name.split(".")
    match kind:
        case "layers":
            return ".".join(parts[: 1 + max(i for i, p in enumerate(parts) if p.isdigit())][:4])
        case "experts":
            return name.rpartition(".")[0]
        case "numbers":
            return ".".join(p for p in parts if p.isdigit())
        case "projections":
            return parts[-1]
    return name


def subset(kind: str, names: list[str], chance: float, seed: int) -> set[str]:
    source = random.Random(f"{kind} {seed}")
    keys = sorted({key_of(kind, each) for each in names})
    chosen = {each for each in keys if source.random() < chance}
    return {each for each in names if key_of(kind, each) in chosen}


def quoted(name: str) -> str:
    """Return an expression for the module's weight."""
    text = "".join(c if c.isalnum() and c.isascii() else f"\\x{{{ord(c):x}}}" for c in name)
    return rf"^{text}\.weight$"


def mixed_output(
    tmp_path: Path, names: list[str], fp8: set[str], plain: set[str], style: str
) -> Path:
    tensors = {f"{each}.weight": torch.randn(16, 16).bfloat16() for each in names}
    tensors["model.norm.weight"] = torch.ones(16)
    source = tmp_path / "in"
    source.mkdir()
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "llama"}')
    quantize: Any = {quoted(each): "none" for each in plain}
    quantize |= {quoted(each): "fp8" for each in fp8 - plain}
    target = tmp_path / "out"
    loadstone.convert(
        source, target, quantize=quantize | {"": "fp8-channel"}, include=".*", style=style
    )
    return target


def section_of(folder: Path) -> dict[str, Any]:
    section: dict[str, Any] = json.loads((folder / "config.json").read_text())[
        "quantization_config"
    ]
    return section


KINDS = ("layers", "experts", "numbers", "projections", "names")
CASES = [(kind, seed) for kind in KINDS for seed in range(3)]


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_compressed_tensors_selects_exactly_each_group(
    kind: str, seed: int, tmp_path: Path
) -> None:
    odd = ODD if seed == 0 else ODD[:10]
    names = GRID + odd
    fp8 = subset("names" if seed == 2 else kind, GRID, 0.5, seed) | subset("names", odd, 0.4, seed)
    plain = subset(kind, GRID, 0.3, -seed - 1) | subset("names", odd, 0.3, -seed - 1)
    folder = mixed_output(tmp_path, names, fp8, plain, "compressed-tensors")
    section = section_of(folder)
    linear = torch.nn.Linear(1, 1)
    groups = section["config_groups"].values()
    found = {
        group["weights"]["strategy"]: {
            each for each in names if is_match(each, linear, group["targets"], section["ignore"])
        }
        for group in groups
    }
    assert found == {"tensor": fp8 - plain, "channel": {*names} - fp8 - plain}
    assert {each for each in names if is_match(each, linear, section["ignore"])} == plain
    assert not is_match(
        "model.norm", torch.nn.LayerNorm(1), section["config_groups"]["group_0"]["targets"]
    )
    assert_read_back(folder)


def test_renames_of_vllm_apply_to_patterns(tmp_path: Path) -> None:
    """vLLM replaces text in all entries when a model has other names (GPT-OSS)."""
    fp8 = {each for each in GRID if "self_attn" in each}
    section = section_of(mixed_output(tmp_path, GRID, fp8, set(), "compressed-tensors"))
    linear = torch.nn.Linear(1, 1)
    for group in section["config_groups"].values():
        targets = [each.replace(".self_attn.", ".attn.", 1) for each in group["targets"]]
        found = {n for n in GRID if is_match(n.replace(".self_attn.", ".attn."), linear, targets)}
        is_fp8 = group["weights"]["strategy"] == "tensor"
        assert found == (fp8 if is_fp8 else {*GRID} - fp8)


def assert_read_back(folder: Path) -> None:
    """loadstone reads the same sets from the lists: it warns if a quantized module is missing."""
    _, report = verified(folder)
    assert [each["message"] for each in report["findings"] if each["code"] == "q.config"] == []


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_wildcards_exclude_exactly_the_plain_modules(kind: str, seed: int, tmp_path: Path) -> None:
    names = GRID + ODD
    plain = subset(kind, GRID, 0.4, seed) | subset("names", ODD, 0.3, seed)
    folder = mixed_output(tmp_path, names, set(), plain, "modelopt")
    excluded = section_of(folder)["ignore"]
    found = {each for each in names if any(fnmatch.fnmatchcase(each, p) for p in excluded)}
    assert found == plain
    assert_read_back(folder)


def test_experts_of_a_layer_are_one_row_of_modelopt(tmp_path: Path) -> None:
    fp8 = {each for each in GRID if "vision" in each or ".2.mlp" in each}
    mixed = "model.layers.10.mlp.experts.11.w3"
    folder = mixed_output(tmp_path, GRID, fp8 | {mixed}, set(), "modelopt")
    layers = section_of(folder)["quantized_layers"]
    assert (
        json.loads((folder / "hf_quant_config.json").read_text())["quantization"][
            "quantized_layers"
        ]
        == layers
    )
    for name in GRID:
        stack, is_expert, _ = name.partition(".experts.")
        key = name if ".layers.10.mlp" in name and "vision" not in name else f"{stack}.experts"
        algorithm = layers[key if is_expert else name]["quant_algo"]
        assert algorithm == ("FP8" if name in fp8 | {mixed} else "FP8_PER_CHANNEL_PER_TOKEN")
    assert len(layers) == 2 * len(LAYERS) * 4 + 11 + len(EXPERTS) * 3


@pytest.mark.parametrize("style", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("rules", [["experts=nvfp4", "self_attn=fp8-block"], ["experts=nvfp4"]])
def test_the_config_of_many_experts_is_small(style: str, rules: list[str], tmp_path: Path) -> None:
    prefix = "language_model.model.layers"
    tensors = {
        f"{prefix}.{layer}.block_sparse_moe.experts.{expert}.{role}.weight": torch.randn(16, 32)
        for layer in (1, 2)
        for expert in range(150)
        for role in ("w1", "w2", "w3")
    } | {
        f"{prefix}.{layer}.self_attn.{each}_proj.weight": torch.randn(128, 128)
        for layer in (1, 2)
        for each in "qo"
    }
    (tmp_path / "in").mkdir()
    save_file({k: v.bfloat16() for k, v in tensors.items()}, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text('{"model_type": "kimi_k3"}')
    options = [word for rule in rules for word in ("--quantize", rule)]
    output("convert", tmp_path / "in", tmp_path / "out", "--style", style, *options)
    for file in (tmp_path / "out").glob("*.json"):
        assert file.stat().st_size < 3000
    assert_read_back(tmp_path / "out")
