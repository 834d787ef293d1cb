"""Adapters that peft trains on whole stacks of experts (``target_parameters``), against peft's own
merge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from merge_models import close, randomised
from safetensors.torch import load_file, save_file
from torch import nn

import loadstone

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

EXPERTS, HIDDEN, INNER, RANK = 3, 16, 12, 4
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
Tensors = dict[str, torch.Tensor]


class Experts(nn.Module):
    """A stack of experts in either order of the last two dimensions."""

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        pair = (HIDDEN, 2 * INNER) if is_transposed else (2 * INNER, HIDDEN)
        single = (INNER, HIDDEN) if is_transposed else (HIDDEN, INNER)
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, *pair))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, *single))


def net(is_transposed: bool = False) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module() for _ in range(2)])
    for layer in model.layers:
        layer.mlp = nn.Module()
        layer.mlp.experts = Experts(is_transposed)
        layer.mlp.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
    return model


def adapted(model: nn.Module, folder: Path, **config: Any) -> Tensors:
    """Save a random adapter of the model; return peft's merge."""
    options = {"target_modules": [], "target_parameters": BOTH, "r": RANK, "lora_alpha": 6}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**options | config))
    randomised(wrapped)
    wrapped.save_pretrained(folder)
    return dict(wrapped.merge_and_unload().state_dict())


def separate(tensors: Tensors) -> Tensors:
    """Return the tensors with separate experts, as many checkpoints store them."""
    found = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        names = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}.get(leaf)
        if names is None:
            found[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            for part, rows in zip(names, matrix.chunk(len(names)), strict=True):
                found[f"{module}.{expert}.{part}.weight"] = rows.contiguous()
    return found


CONFIGS: dict[str, dict[str, Any]] = {
    "both": {},
    "one": {"target_parameters": BOTH[1:]},
    "with a module": {"target_modules": ["gate"]},
    "rslora": {"use_rslora": True},
    "alpha of a parameter": {"alpha_pattern": {"experts.down_proj": 32}},
    "alpha of a name": {"alpha_pattern": {"gate_up_proj": 32, "mlp.experts": 5}},
    "rank of a parameter": {"rank_pattern": {"experts.down_proj": 7}},
}


@pytest.mark.parametrize("door", ["python", "command", "load"])
@pytest.mark.parametrize("layout", ["stack", "transposed stack", "separate"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_merge_is_pefts(kind: str, layout: str, door: str, tmp_path: Path) -> None:
    model = net(layout == "transposed stack")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = adapted(model, tmp_path / "adapter", **CONFIGS[kind])
    base, out = tmp_path / "base.safetensors", tmp_path / "out.safetensors"
    save_file(separate(before) if layout == "separate" else before, base)
    if door == "load":
        if layout == "separate":
            pytest.skip("needs the rules of a library, see the test of a library's model")
        with torch.device("meta"):
            loaded = net(layout == "transposed stack")
        loadstone.load(loaded, base, lora=tmp_path / "adapter")
        found = dict(loaded.state_dict())
    else:
        if door == "python":
            loadstone.merge(base, out, lora=tmp_path / "adapter")
        else:
            assert run("merge", base, "-o", out, "--lora", tmp_path / "adapter").returncode == 0
        found = load_file(out)
    expected = separate(expected) if layout == "separate" else expected
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        close(found[name], tensor, 200)
    changed = {name for name in before if not torch.equal(before[name], model.state_dict()[name])}
    assert changed


@pytest.mark.parametrize("door", ["merge", "load"])
def test_a_librarys_model_with_separate_experts_in_its_files(door: str, tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=48, moe_intermediate_size=24,
        num_experts=4, num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=64,
    )  # fmt: skip
    torch.manual_seed(2)
    model = transformers.Qwen3MoeForCausalLM(config)
    base, out = tmp_path / "base", tmp_path / "out"
    model.save_pretrained(base)
    stored = load_file(base / "model.safetensors")
    assert any(".experts.0.up_proj" in name for name in stored)
    expected = adapted(model, tmp_path / "adapter")
    source, options = base, {"lora": tmp_path / "adapter"}
    if door == "merge":
        loadstone.merge(base, out, **options)
        source, options = out, {}
    loaded = loadstone.transformers.from_pretrained(
        transformers.Qwen3MoeForCausalLM, source, **options
    )
    for name, tensor in loaded.state_dict().items():
        close(tensor, expected[name], 200)


def test_experts_that_are_quantized_are_decoded(tmp_path: Path) -> None:
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapted(model, tmp_path / "adapter")
    save_file(separate(before), tmp_path / "plain.safetensors")
    base = tmp_path / "base.safetensors"
    loadstone.convert(
        tmp_path / "plain.safetensors", base, quantize="int8-channel", include=r"experts\."
    )
    decoded = tmp_path / "decoded.safetensors"
    loadstone.convert(base, decoded, dequantize=True, dtype="float32")
    for source, target in ((base, "a.safetensors"), (decoded, "b.safetensors")):
        loadstone.merge(source, tmp_path / target, lora=tmp_path / "adapter", dtype="float32")
    first, second = (load_file(tmp_path / f"{each}.safetensors") for each in "ab")
    assert all(torch.equal(first[name], second[name]) for name in second)


@pytest.mark.parametrize("experts", [EXPERTS + 1, 1])
def test_an_adapter_for_a_different_number_of_experts(experts: int, tmp_path: Path) -> None:
    adapted(net(), tmp_path / "adapter")
    base = {
        "layers.0.mlp.experts.gate_up_proj": torch.randn(experts, 2 * INNER, HIDDEN),
        "layers.0.mlp.experts.down_proj": torch.randn(experts, HIDDEN, INNER),
    }
    save_file(base, tmp_path / "base.safetensors")
    with pytest.raises(loadstone.FormatError, match="different rank for the module"):
        loadstone.merge(
            tmp_path / "base.safetensors", tmp_path / "out.safetensors", lora=tmp_path / "adapter"
        )
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("key", ["gate", "gate.weight", "mlp.gate.weight"])
def test_patterns_of_a_matrix_that_is_adapted_as_a_parameter(key: str, tmp_path: Path) -> None:
    model = net()
    base, out = tmp_path / "base.safetensors", tmp_path / "out.safetensors"
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, base)
    options = {"target_parameters": ["mlp.gate.weight"], "alpha_pattern": {key: 32}}
    expected = adapted(model, tmp_path / "adapter", **options)
    loadstone.merge(base, out, lora=tmp_path / "adapter")
    for name, tensor in load_file(out).items():
        close(tensor, expected[name], 200)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_stack_of_one_square_expert(is_transposed: bool, tmp_path: Path) -> None:
    """peft adds the product of a single expert as it is."""
    model = nn.Module()
    model.experts = nn.Module()
    model.experts.is_transposed = is_transposed
    model.experts.down_proj = nn.Parameter(torch.randn(1, HIDDEN, HIDDEN))
    base, out = tmp_path / "base.safetensors", tmp_path / "out.safetensors"
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, base)
    expected = adapted(model, tmp_path / "adapter", target_parameters=["experts.down_proj"])
    loadstone.merge(base, out, lora=tmp_path / "adapter")
    close(load_file(out)["experts.down_proj"], expected["experts.down_proj"], 200)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("square", BOTH)
def test_square_experts(
    square: str, is_transposed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer's other stack shows which dimension is the output."""
    monkeypatch.setitem(globals(), "INNER", HIDDEN if square == BOTH[1] else HIDDEN // 2)
    model, base, out = (
        net(is_transposed),
        tmp_path / "base.safetensors",
        tmp_path / "out.safetensors",
    )
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, base)
    expected = adapted(model, tmp_path / "adapter", target_parameters=[square])
    loadstone.merge(base, out, lora=tmp_path / "adapter")
    for name, tensor in load_file(out).items():
        close(tensor, expected[name], 200)
    # Without peft's version, which determines the order of the factors, the adapter is ambiguous.
    path = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    del config["peft_version"]
    path.write_text(json.dumps(config))
    with pytest.raises(loadstone.PlanError, match="ambiguous"):
        loadstone.merge(base, tmp_path / "other.safetensors", lora=tmp_path / "adapter")
