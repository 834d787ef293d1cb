"""Functions for test_advice.py that follow the adapters' advice on models of other libraries."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import loadstone


def refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((loadstone.Error, ValueError, TypeError), match=re.escape(words)):
        call()


def mixture(folder: Path) -> tuple[Any, Path]:
    """Write a mixture of experts whose checkpoint has one tensor per expert."""
    from transformers_models import by_name, write_checkpoint

    case = by_name("mixtral")
    path = write_checkpoint(case, folder / "mixture", "public", torch.float32)
    return case.cls.from_pretrained(path), path


def traced_rules(file: Path) -> None:
    model, folder = mixture(file.parent)
    catalog = loadstone.inspect(folder)
    traced = loadstone.transformers.trace(model, catalog)

    def convert(source: Any, name: str, **options: Any) -> None:
        loadstone.convert(source, file.parent / name, **options)
        found = load_file(file.parent / name / "model.safetensors")
        expected = model.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)

    refused(lambda: convert(folder, "a", rules=traced), "that they were traced with: pass that")
    convert(catalog, "a", rules=traced)
    with ThreadPoolExecutor(1) as pool:
        refused(
            lambda: convert(folder, "b", rules=traced, cluster=pool),
            "save them with save_recipes, and pass the file",
        )
        recipes = file.parent / "recipes.json"
        loadstone.save_recipes(model, folder, recipes, rules="transformers")
        convert(folder, "b", rules=recipes, cluster=pool, parts=1)


def a_gap_in_a_series(file: Path) -> None:
    model, folder = mixture(file.parent)
    path = folder / "model.safetensors"
    good = load_file(path)
    stray = {
        name.replace("experts.2", "experts.7"): each.clone()
        for name, each in good.items()
        if "experts.2" in name
    }
    assert stray
    save_file(good | stray, path, {"format": "pt"})

    def load() -> Any:
        return loadstone.transformers.from_pretrained(type(model), folder)

    refused(load, "remove these tensors from the checkpoint, or rename them so that the numbers")
    save_file(good, path, {"format": "pt"})
    for name, each in load().state_dict().items():
        assert torch.equal(each, model.state_dict()[name]), name


def an_adapter_of_a_pipeline(file: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    unet = diffusers.UNet2DModel(
        8,
        block_out_channels=(8,),
        norm_num_groups=4,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    )
    cls, folder, adapter = diffusers.DDPMPipeline, file.parent / "pipe", file.parent / "adapter"
    cls(unet, diffusers.DDPMScheduler()).save_pretrained(folder)
    name, left, right = "mid_block.attentions.0.to_q", torch.randn(2, 8), torch.randn(8, 2)
    adapter.mkdir()
    product = {f"base_model.model.{name}.lora_A.weight": left}
    product |= {f"base_model.model.{name}.lora_B.weight": right}
    save_file(product, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["to_q"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    load = loadstone.diffusers.from_pretrained
    refused(lambda: load(cls, folder, lora=adapter), "load one of them with lora=, and pass it on")
    merged = load(type(unet), folder / "unet", lora=adapter)
    pipe = load(cls, folder, unet=merged)
    assert pipe.unet is merged
    expected = unet.get_submodule(name).weight + right @ left
    assert torch.allclose(merged.get_submodule(name).weight, expected)


def a_gguf_file_that_a_server_quantizes(file: Path) -> None:
    from loadstone._adapters.serving.converted import plan_conversion
    from loadstone._adapters.serving.options import ConversionOptions

    gguf, folder = file.parent / "net.gguf", file.parent / "folder"
    save_file({"layer.weight": torch.randn(64, 64)}, file)
    loadstone.convert(file, gguf, metadata={"general.architecture": "llama"})
    changes = ConversionOptions(quantize="fp8", include=("layer",))
    refused(lambda: plan_conversion(str(gguf), changes), "while it is served: convert it first")
    loadstone.convert(gguf, folder, quantize="fp8", include="layer")
    assert load_file(folder / "model.safetensors")["layer.weight"].dtype == torch.float8_e4m3fn
