"""Tests that quantized modules on disk stay quantized and give the same outputs as in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("bitsandbytes")
from bitsandbytes_checkpoints import KINDS, config, plain, quantized, raw
from offload_folders import left_over, raw_value, written
from pairs import pairs
from transformers_models import by_name

import loadstone
import loadstone.bitsandbytes

ours = loadstone.transformers.from_pretrained
LAYER = "model.layers.1"
MAPS: dict[str, dict[str, str]] = {"a layer": {"": "cpu", LAYER: "disk"}, "all": {"": "disk"}}
IDS = torch.arange(12).reshape(2, 6)


def checkpoint(stored: bool, kind: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    if stored:
        return quantized("llama", kind, folder), {}
    return plain("llama", folder), {"quantization_config": config(kind)}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize(
    ("kind", "stored", "on_disk"), pairs(list(KINDS), [True, False], list(MAPS))
)
def test_a_model_on_disk_computes_what_it_does_in_memory(
    kind: str, stored: bool, on_disk: str, tmp_path: Path
) -> None:
    cls = by_name("llama").cls
    folder, options = checkpoint(stored, kind, tmp_path)
    whole = loadstone.bitsandbytes.heal(ours(cls, folder, **options))
    expected = logits(whole)
    state = whole.state_dict()
    options |= {"device_map": MAPS[on_disk], "offload_folder": tmp_path / "offload"}
    model = ours(cls, folder, **options)
    layer = model.get_submodule(f"{LAYER}.mlp.up_proj")
    assert layer.weight.is_meta
    audit = loadstone.audit(model)
    audit.require_real()
    for _ in range(2):
        assert torch.equal(logits(model), expected)
    assert f"{LAYER}.mlp.up_proj.weight" in audit.not_held
    for name, tensor in layer.state_dict().items():
        assert torch.equal(raw(tensor), raw(state[f"{LAYER}.mlp.up_proj.{name}"])), name


@pytest.mark.parametrize("kind", ["nf4", "nf4 nested", "fp4 in bfloat16", "int8"])
def test_the_folder_holds_quantized_bytes(kind: str, tmp_path: Path) -> None:
    cls, offload = by_name("llama").cls, tmp_path / "offload"
    folder, options = checkpoint(False, kind, tmp_path)
    whole = ours(cls, folder, **options)
    ours(cls, folder, device_map={"": "disk"}, offload_folder=offload, **options)
    index = json.loads((offload / "index.json").read_text())
    wanted = {name for name in whole.state_dict() if ".mlp." in name}
    assert {name for name in index if ".mlp." in name} == wanted
    for name in wanted:
        assert raw_value(offload, name) == raw(whole.state_dict()[name]).numpy().tobytes()
    assert left_over(offload) == []
    assert {name for name in written(offload) if ".mlp." in name} == wanted


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_the_library_refuses_such_maps(kind: str, tmp_path: Path) -> None:
    """Control: transformers alone rejects quantized modules on disk."""
    folder, options = checkpoint(False, kind, tmp_path)
    cls = by_name("llama").cls
    with pytest.raises(ValueError, match="dispatched on the CPU or the disk"):
        cls.from_pretrained(folder, device_map=MAPS["a layer"], **options)
    with loadstone.patch("transformers"):
        model = cls.from_pretrained(
            folder, device_map=MAPS["a layer"], offload_folder=tmp_path / "offload", **options
        )
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("kind", ["nf4", "nf4 nested", "int8"])
@pytest.mark.parametrize("stored", [True, False], ids=["stored", "on the way"])
def test_computed_maps_count_quantized_bytes(kind: str, stored: bool, tmp_path: Path) -> None:
    cls = by_name("llama").cls
    folder, options = checkpoint(stored, kind, tmp_path)
    whole = loadstone.bitsandbytes.heal(ours(cls, folder, **options))
    small = ("bitsandbytes__", "weight_format")
    sizes = {
        name: tensor.nbytes
        for name, tensor in whole.state_dict().items()
        if not any(word in name for word in small)
    }
    need = sum(sizes.values()) + sum(each.nbytes for each in whole.buffers())
    # Each nested scale has an offset of 4 bytes.
    need += 4 * sum(name.endswith("nested_absmax") for name in sizes)
    expected = logits(whole)
    for room, on_disk in ((need, False), (need - 1, True)):
        model = ours(
            cls,
            folder,
            device_map="auto",
            max_memory={"cpu": room},
            offload_folder=tmp_path / "offload",
            **options,
        )
        assert ("disk" in getattr(model, "hf_device_map", {}).values()) == on_disk
        assert torch.equal(logits(loadstone.bitsandbytes.heal(model)), expected)


@pytest.mark.parametrize("mode", ["auto", "balanced", "sequential"])
def test_maps_for_several_devices_count_quantized_bytes(mode: str, tmp_path: Path) -> None:
    """The devices do not exist; a plan needs only their sizes."""
    cls, folder = by_name("llama").cls, plain("llama", tmp_path)
    with loadstone.skeleton():
        model = cls(cls.config_class.from_pretrained(folder)).to(torch.bfloat16)
    sizes = {}
    for quantize in (None, "nf4"):
        room = {0: 60_000, 1: 60_000, "cpu": 10_000_000}
        plan = loadstone.plan(model, folder, quantize=quantize, device_map=mode, max_memory=room)
        plan.require_ok()
        sizes[quantize] = dict.fromkeys(("cuda:0", "cuda:1", "cpu"), 0)
        for target in plan.targets:
            sizes[quantize][target.device] += target.nbytes
        assert max(sizes[quantize]["cuda:0"], sizes[quantize]["cuda:1"]) <= 60_000
    assert sizes[None]["cpu"] > 40_000  # control: the dequantized model does not fit
    assert sizes["nf4"]["cpu"] < 1_000
    assert sum(sizes["nf4"].values()) < 0.6 * sum(sizes[None].values())
