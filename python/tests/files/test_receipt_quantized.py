"""Tests that audits of quantized models against a receipt name every tensor with a changed bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docs_worlds
import pytest
import torch

import loadstone
from loadstone._files.receipt import read_components
from loadstone._model.walk import walk

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return docs_worlds.llama(tmp_path_factory.mktemp("receipt") / "llama")


def by_transformers(folder: Path, **arguments: Any) -> torch.nn.Module:
    cls = transformers.AutoModelForCausalLM
    return loadstone.transformers.from_pretrained(
        cls, folder, dtype=torch.bfloat16, receipt="xxh3-128", **arguments
    )


def four_bits(folder: Path, **options: Any) -> torch.nn.Module:
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, **options)
    return by_transformers(folder, quantization_config=config)


def eight_bits(folder: Path) -> torch.nn.Module:
    return by_transformers(
        folder, quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True)
    )


def stored(folder: Path) -> torch.nn.Module:
    """Load codes and scales unchanged, into a model that stores them."""
    out = folder.with_name("stored")
    if not out.exists():
        loadstone.convert(folder, out, quantize="nf4")
    return by_transformers(out)


def any_module(folder: Path) -> torch.nn.Module:
    with loadstone.skeleton():
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
        )
    quantize = {r".*q_proj": "int8", r".*up_proj": loadstone.Quantization("nf4", nested=True)}
    loadstone.load(model, folder, rules="transformers", quantize=quantize, receipt="xxh3-128")
    return model


def modelopt(folder: Path, kind: str) -> torch.nn.Module:
    pytest.importorskip("modelopt")
    from modelopt_models import config

    return loadstone.modelopt.load(
        transformers.AutoModelForCausalLM, folder, config(kind), receipt="xxh3-128"
    )


def by_accelerate(folder: Path) -> torch.nn.Module:
    config = transformers.AutoConfig.from_pretrained(folder)
    with loadstone.skeleton():
        model = transformers.AutoModelForCausalLM.from_config(config)
    return loadstone.accelerate.load_checkpoint_and_dispatch(
        model, folder, device_map={"": "cpu"}, receipt="xxh3-128"
    )


def by_diffusers(folder: Path, **arguments: Any) -> torch.nn.Module:
    """Load GGUF blocks, either unchanged or dequantized."""
    diffusers = pytest.importorskip("diffusers")
    files = folder.with_name("wan")
    if not files.exists():
        files.mkdir()
        docs_worlds.wan(files)
    if arguments:
        arguments = {"quantization_config": diffusers.GGUFQuantizationConfig(**arguments)}
    return loadstone.diffusers.from_single_file(
        diffusers.WanTransformer3DModel,
        files / "wan2.2-Q4_K_M.gguf",
        config=str(files / "folder"),
        subfolder="transformer",
        torch_dtype=torch.bfloat16,
        receipt="xxh3-128",
        **arguments,
    )


LOADS: dict[str, Callable[[Path], torch.nn.Module]] = {
    "plain": by_transformers,
    "nf4": lambda folder: four_bits(folder, bnb_4bit_quant_type="nf4"),
    "fp4": lambda folder: four_bits(folder, bnb_4bit_quant_type="fp4"),
    "nested": lambda folder: four_bits(folder, bnb_4bit_use_double_quant=True),
    "int8": eight_bits,
    "stored": stored,
    "any module": any_module,
    "accelerate": by_accelerate,
    "diffusers": by_diffusers,
    "blocks": lambda folder: by_diffusers(folder, compute_dtype=torch.bfloat16),
    "modelopt fp8": lambda folder: modelopt(folder, "fp8"),
    "modelopt nvfp4": lambda folder: modelopt(folder, "nvfp4"),
}


def memories(model: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield name, component and writable bytes of every loaded tensor."""
    provenance = loadstone.audit(model).provenance
    for slot in walk(model):
        if provenance[slot.name].origin != "checkpoint":
            continue
        for component, tensor in {"": slot.tensor, **read_components(slot.tensor)}.items():
            yield slot.name, component, tensor.detach().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("name", LOADS)
def test_a_bit_of_any_component_is_named(name: str, folder: Path) -> None:
    model = LOADS[name](folder)
    before = loadstone.audit(model, receipt=True)
    assert before.ok
    assert before.changed == []
    found = list(memories(model))
    assert {each for each, _, _ in found} == set(before.proved)
    for slot, component, memory in found:
        flipped = memory.numpy()  # torch's version counter does not count writes through numpy
        at = flipped.size // 2
        flipped[at] ^= 4
        changed = loadstone.audit(model, receipt=True).changed
        flipped[at] ^= 4
        assert slot in changed, component
    assert loadstone.audit(model, receipt=True).changed == []


def test_a_load_without_a_receipt_has_none(folder: Path) -> None:
    model = loadstone.transformers.from_pretrained(transformers.AutoModelForCausalLM, folder)
    with pytest.raises(loadstone.Error) as caught:
        loadstone.audit(model, receipt=True)
    assert caught.value.code == "plan.options"
