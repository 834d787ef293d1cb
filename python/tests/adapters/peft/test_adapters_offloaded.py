"""Tests that adapters of offloaded layers compute and merge with the base weight's values.

The expected outputs are those of the same model in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import peft
import pytest
import torch
from diffusers_pipelines import unet
from peft import LoraConfig, get_peft_model
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import loadstone
from loadstone._adapters.peft import hooks

IDS = torch.arange(8)[None]
PLACES = {"": "cpu", "model.layers.1": "disk"}
LAYERS = {"target_modules": ["q_proj", "down_proj"]}
REFUSED = "refused"  # marks kinds that PEFT creates from the base weight, or on its device

# Options of each kind of adapter, except prompts and kinds with shared state, which have no layers.
KINDS: dict[str, list[dict[str, Any]]] = {
    "LORA": [{"r": 2}, {"r": 4, "use_qalora": True}],
    "LOHA": [{"r": 2}],
    "LOKR": [{"r": 2}],
    "IA3": [{"feedforward_modules": []}],
    "OFT": [{"r": 0, "oft_block_size": 4}, {"r": 0, "oft_block_size": 4, "coft": True}],
    "BOFT": [{"boft_block_size": 4}],
    "HRA": [{"r": 4}, {"r": 4, "apply_GS": True}],
    "MISS": [{"r": 4}, {"r": 4, "init_weights": "bat"}],
    "PEANUT": [{}],
    "WAVEFT": [{"n_frequency": 20}],
    "FOURIERFT": [{"n_frequency": 20}],
    "ROAD": [{"group_size": 4}],
    "GRALORA": [{"r": 4, "gralora_k": 2}],
    "LILY": [{"r": 4}],
    "BEFT": [{}],
    "ADALORA": [{"total_step": 10}],
    "DEFT": [{}],
    "GLORA": [{"r": 4}],
    "HIRA": [{"r": 4}],
    "RANDLORA": [{"r": 4}],
    "TRAINABLE_TOKENS": [{"token_indices": [1, 2], "target_modules": ["embed_tokens"]}],
    "SUPERTUNING": [{REFUSED: True}],
    "LN_TUNING": [{"target_modules": ["input_layernorm"], REFUSED: True}],
    "PSOFT": [{"r": 4, REFUSED: True}],
    "C3A": [{"block_size": 4, REFUSED: True}],
    "SHIRA": [{"r": 2, REFUSED: True}],
    "DELORA": [{"r": 2, REFUSED: True}],
    "OSF": [{REFUSED: True}],
    "ADAMSS": [{REFUSED: True}],
}
CASES = [(kind, options) for kind, cases in KINDS.items() for options in cases]


def config_of(kind: str, options: dict[str, Any]) -> Any:
    arguments = LAYERS | {name: value for name, value in options.items() if name != REFUSED}
    return peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[kind]](**arguments)


def spread(model: Any) -> Any:
    """Give the adapter random values that change the output."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def offloaded(base: Path, tmp_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        base, device_map=PLACES, offload_folder=tmp_path / "offload"
    )


def adapter_of(base: Path, tmp_path: Path, kind: str, options: dict[str, Any]) -> torch.Tensor:
    """Write an adapter; return the outputs of the model in memory with the adapter."""
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config_of(kind, options))
    spread(model).save_pretrained(tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(base)
    model.load_adapter(tmp_path / "adapter")
    logits: torch.Tensor = model.eval()(IDS).logits
    return logits


def test_every_kind_of_adapter_is_here() -> None:
    known = {
        kind.value
        for kind, tuner in PEFT_TYPE_TO_TUNER_MAPPING.items()
        if hasattr(tuner, "inject_adapter") and not tuner.uses_shared_state
    }
    # These kinds need task ids in forward(), cannot be injected, or mix LoRA adapters.
    assert known - {"POLY", "SHADOW", "XLORA"} <= KINDS.keys(), known - KINDS.keys()


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_an_adapter_of_a_layer_on_disk(
    base: Path, tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    expected = adapter_of(base, tmp_path, kind, options)
    assert not torch.equal(expected, AutoModelForCausalLM.from_pretrained(base)(IDS).logits)
    with loadstone.patch("transformers", "peft"):
        model = offloaded(base, tmp_path)
        if REFUSED in options:
            with pytest.raises(loadstone.PlanError, match="without offloading this layer"):
                model.load_adapter(tmp_path / "adapter")
            return
        model.load_adapter(tmp_path / "adapter")
    model.eval()
    for _ in range(2):
        assert torch.equal(model(IDS).logits, expected)
    assert model.model.layers[1].self_attn.k_proj.weight.is_meta  # the layer is still offloaded
    down = model.model.layers[1].mlp.down_proj
    assert getattr(down, "base_layer", down).weight.is_meta


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", KINDS["HRA"], ids=str)
def test_control_without_the_weight_the_output_is_another_one(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    expected = adapter_of(base, tmp_path, "HRA", options)
    monkeypatch.setattr(hooks, "bring_weights_for", lambda layer: None)
    with loadstone.patch("transformers", "peft"):
        model = offloaded(base, tmp_path)
        model.load_adapter(tmp_path / "adapter")
    assert not torch.equal(model.eval()(IDS).logits, expected)


# --- merges --------------------------------------------------------------------------------------


def layers_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]


def merged(model: Any) -> None:
    for layer in layers_of(model):
        layer.merge()


def merged_and_back(model: Any) -> None:
    merged(model)
    for layer in layers_of(model):
        layer.unmerge()


def merged_and_disabled(model: Any) -> None:
    """Disabled layers unmerge in their first forward pass."""
    merged(model)
    for layer in layers_of(model):
        layer.enable_adapters(False)


MERGES: dict[str, Callable[[Any], Any]] = {
    "merge": merged,
    "unmerge": merged_and_back,
    "disabled": merged_and_disabled,
    "PEFT's merge": lambda model: model.merge_adapter(),
    "PEFT's unmerge": lambda model: (model.merge_adapter(), model.unmerge_adapter()),
    "PEFT's unload": lambda model: model.merge_and_unload(),
}


@torch.no_grad()
@pytest.mark.parametrize("when", ["patched", "after the patch"])
@pytest.mark.parametrize("way", MERGES)
def test_a_merge_into_a_layer_on_disk(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, when: str
) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_of("LORA", {"r": 2})
    torch.manual_seed(0)
    in_memory = spread(get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)).eval()
    file = (base / "model.safetensors").read_bytes()
    with loadstone.patch("transformers", "peft"):
        torch.manual_seed(0)
        model = spread(get_peft_model(offloaded(base, tmp_path), config)).eval()
        if when == "patched":
            MERGES[way](model)
    if when != "patched":
        MERGES[way](model)
    MERGES[way](in_memory)
    for _ in range(2):
        assert torch.equal(model(IDS).logits, in_memory(IDS).logits)
    assert any(parameter.is_meta for parameter in model.parameters())
    assert (base / "model.safetensors").read_bytes() == file


FUSES: dict[str, Callable[[Any], Any]] = {
    "fuse": lambda model: model.fuse_lora(),
    "scale": lambda model: model.fuse_lora(0.5, safe_fusing=True, adapter_names=["default_0"]),
    "unload": lambda model: (model.fuse_lora(), model.unload_lora()),
    "unfuse": lambda model: (model.fuse_lora(), model.unfuse_lora()),
    "disable": lambda model: model.disable_lora(),
    "nothing": lambda model: None,
}


@torch.no_grad()
@pytest.mark.parametrize("places", [{"": "cpu", "mid_block": "disk"}, {"": "disk"}], ids=str)
@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("way", FUSES)
def test_fuse_lora_of_a_diffusers_model_on_disk(
    tmp_path: Path, way: str, use_dora: bool, places: dict[str, str]
) -> None:
    torch.manual_seed(0)
    model = unet(8).eval()
    model.save_pretrained(tmp_path / "base")
    inputs = torch.randn(1, 4, 8, 8), torch.tensor(3), torch.randn(1, 4, 8)
    base = model(*inputs).sample
    targets = ["to_q", "conv1"]
    model.add_adapter(
        LoraConfig(r=2, target_modules=targets, init_lora_weights=False, use_dora=use_dora)
    )
    model.save_lora_adapter(tmp_path / "lora")
    results = []
    for is_offloaded in (False, True):
        cls = diffusers.UNet2DConditionModel
        more = {"device_map": places, "offload_folder": str(tmp_path / "offload")}
        with loadstone.patch("diffusers"):
            model = cls.from_pretrained(tmp_path / "base", **(more if is_offloaded else {})).eval()
            model.load_lora_adapter(
                tmp_path / "lora",
                prefix=None,
                weight_name="pytorch_lora_weights.safetensors",
                low_cpu_mem_usage=True,  # as in pipelines; otherwise DoRA's initialiser runs
            )
            FUSES[way](model)
        assert any(parameter.is_meta for parameter in model.parameters()) == is_offloaded
        results.append(model(*inputs).sample)
    assert torch.equal(*results)
    assert torch.equal(results[0], base) == (way == "disable")
