"""Tests that an audit leaves out the tensors that hooks store, but not changes of the model."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from diffusers.hooks import apply_group_offloading
from diffusers.hooks.group_offloading import _maybe_remove_and_reapply_group_offloading
from safetensors.torch import load_file, save_file

import loadstone

CPU = torch.device("cpu")
INPUTS = {
    "hidden_states": torch.ones(1, 16, 4),
    "encoder_hidden_states": torch.ones(1, 8, 32),
    "pooled_projections": torch.ones(1, 32),
    "timestep": torch.tensor([1.0]),
    "img_ids": torch.zeros(16, 3),
    "txt_ids": torch.zeros(8, 3),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    path = tmp_path_factory.mktemp("flux")
    model.save_pretrained(path)
    return path


def loaded(folder: Path, **options: Any) -> Any:
    model = loadstone.diffusers.from_pretrained(diffusers.FluxTransformer2DModel, folder, **options)
    assert loadstone.audit(model).changed == []
    return model


def cache(model: Any, folder: Path) -> None:
    model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.1))
    with model.cache_context("cond"):
        model(**INPUTS)


def offload(model: Any, folder: Path) -> None:
    apply_group_offloading(model, CPU, CPU, offload_type="leaf_level")
    model(**INPUTS)


def offload_again(model: Any, folder: Path) -> None:
    offload(model, folder)
    _maybe_remove_and_reapply_group_offloading(model)


HOOKS: dict[str, Callable[[Any, Path], None]] = {
    "cached outputs": cache,
    "group offload": offload,
    "group offload that is applied again": offload_again,
}


@torch.no_grad()
@pytest.mark.parametrize("name", HOOKS)
def test_tensors_of_hooks_are_left_out(folder: Path, tmp_path: Path, name: str) -> None:
    model = loaded(folder)
    HOOKS[name](model, tmp_path)
    result = loadstone.audit(model)
    assert result.ok
    assert not [path for path in [*result.provenance, *result.changed] if "_hook" in path]
    assert result.changed == []
    model.proj_out.bias.add_(1)
    assert "proj_out.bias" in loadstone.audit(model).changed
    del model.proj_out.weight
    model.proj_out.weight = torch.nn.Parameter(torch.zeros(4, 32))
    assert "proj_out.weight" in loadstone.audit(model).changed


@torch.no_grad()
def test_group_offload_to_disk_leaves_no_values(folder: Path, tmp_path: Path) -> None:
    model = loaded(folder)
    own = {name for name, _ in model.named_parameters()}
    expected = model(**INPUTS).sample
    apply_group_offloading(
        model, CPU, offload_type="leaf_level", offload_to_disk_path=str(tmp_path / "groups")
    )
    torch.testing.assert_close(model(**INPUTS).sample, expected)
    result = loadstone.audit(model)
    assert set(result.unaccounted) == result.not_held.keys() == own
    with pytest.raises(loadstone.AuditError, match=r"offloaded them to files in .*load it again"):
        result.require_real()
    refused = pytest.raises(loadstone.OptionError, match="Save the model before this offload")
    with loadstone.patch("diffusers"), refused:
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    again = loaded(folder)
    again.save_pretrained(tmp_path / "saved")
    assert loadstone.audit(again).ok


@torch.no_grad()
def test_a_device_map_with_a_layer_on_disk(folder: Path, tmp_path: Path) -> None:
    """Between passes, accelerate's hooks keep the values of the layer, not the layer itself."""
    places = {"": "cpu", "transformer_blocks.0": "disk"}
    model = loaded(folder, device_map=places, offload_folder=str(tmp_path / "offload"))
    model(**INPUTS)
    result = loadstone.audit(model)
    assert result.ok
    assert result.changed == []
    model.proj_out.bias.add_(1)
    assert loadstone.audit(model).changed == ["proj_out.bias"]


@torch.no_grad()
@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_files_that_hooks_read_must_not_change(folder: Path, tmp_path: Path, change: str) -> None:
    source = tmp_path / "model"
    shutil.copytree(folder, source)
    places = {"": "cpu", "transformer_blocks.0": "disk"}
    model = loaded(source, device_map=places, offload_folder=str(tmp_path / "offload"))
    model(**INPUTS)
    file = source / "diffusion_pytorch_model.safetensors"
    if change == "replaced":
        save_file({name: value * 2 for name, value in load_file(file).items()}, file)
    else:
        file.unlink()
    with pytest.raises(loadstone.Error, match="load the model again") as caught:
        model(**INPUTS)
    assert caught.value.code == "io.changed" and caught.value.path == str(file)
    if change == "replaced":
        loaded(source, device_map=places, offload_folder=str(tmp_path / "another"))(**INPUTS)


def test_offloaded_values_are_saved(folder: Path, tmp_path: Path) -> None:
    places = {"": "cpu", "transformer_blocks.0": "disk"}
    model = loaded(folder, device_map=places, offload_folder=str(tmp_path / "offload"))
    for name, each in {"model": model, "copy": copy.deepcopy(model)}.items():
        each.save_pretrained(tmp_path / name)
        saved = load_file(tmp_path / name / "diffusion_pytorch_model.safetensors")
        expected = load_file(folder / "diffusion_pytorch_model.safetensors")
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[key], expected[key]) for key in expected)
    assert model.transformer_blocks[0].norm1.linear.weight.is_meta


def without_encoders(model: Any) -> Any:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    names = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    absent = dict.fromkeys(names)
    return diffusers.FluxPipeline(transformer=model, scheduler=scheduler, **absent)


OFFLOADS: dict[str, Callable[[Any, Path], Any]] = {
    "cpu_offload": lambda model, _: cpu_offload(model, CPU, offload_buffers=True),
    "sequential": lambda model, _: without_encoders(model).enable_sequential_cpu_offload(
        device="cpu"
    ),
    "disk_offload": lambda model, path: disk_offload(model, path, CPU),
}


@torch.no_grad()
@pytest.mark.parametrize("name", OFFLOADS)
def test_weights_that_accelerate_offloads_after_a_load(
    folder: Path, tmp_path: Path, name: str
) -> None:
    model = loaded(folder)
    own = {name for name, _ in model.named_parameters()}
    OFFLOADS[name](model, tmp_path)
    if name != "sequential":  # fails in accelerate 1.15 on the CPU
        model(**INPUTS)
    result = loadstone.audit(model)
    assert result.ok and result.not_held == dict.fromkeys(own, "offloaded")
    # An audit reads no files, so it cannot know what a file of accelerate contains.
    assert set(result.changed) == (own if name == "disk_offload" else set())
    if name != "disk_offload":
        model.proj_out._hf_hook.weights_map["bias"].add_(1)
        assert loadstone.audit(model).changed == ["proj_out.bias"]
    model.proj_out._hf_hook.weights_map = {}
    assert loadstone.audit(model).on_meta == ["proj_out.weight", "proj_out.bias"]


def test_weights_that_were_offloaded_without_a_load(folder: Path) -> None:
    model = diffusers.FluxTransformer2DModel.from_pretrained(folder)
    cpu_offload(model, CPU)
    assert len(loadstone.audit(model).unaccounted) == len(list(model.parameters()))


@pytest.mark.parametrize("name", [*OFFLOADS])
def test_weights_that_accelerate_offloads_are_saved_under_the_patch(
    folder: Path, tmp_path: Path, name: str
) -> None:
    model = loaded(folder)
    OFFLOADS[name](model, tmp_path / "offload")
    with loadstone.patch("diffusers"):
        model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved/diffusion_pytorch_model.safetensors")
    expected = load_file(folder / "diffusion_pytorch_model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[key], expected[key]) for key in expected)
