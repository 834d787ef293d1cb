"""``save_pretrained`` of loaded models after diffusers or accelerate offloaded them, unpatched."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import pickle
import pickletools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from diffusers.hooks import apply_group_offloading
from diffusers_models import by_name, write_single_file
from diffusers_pipelines import stable_diffusion
from safetensors.torch import load_file

import loadstone
import loadstone.diffusers

CPU = torch.device("cpu")
PARTS = {
    "unet": "diffusion_pytorch_model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
    "text_encoder": "model.safetensors",
}
OFFLOADS: dict[str, Callable[[Any, Path], object]] = {
    "cpu": lambda model, folder: cpu_offload(model, CPU),
    "disk": lambda model, folder: disk_offload(model, str(folder), CPU),
}


def to_groups(model: Any, folder: Path) -> None:
    apply_group_offloading(
        model, CPU, offload_type="leaf_level", offload_to_disk_path=str(folder / "groups")
    )


def assert_same_file(file: Path, expected: Path) -> None:
    values = load_file(expected)
    saved = load_file(file)
    assert saved.keys() == values.keys()
    assert all(torch.equal(saved[key], values[key]) for key in values)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    stable_diffusion(tmp_path / "pipe")
    return tmp_path / "pipe"


def loaded(folder: Path) -> Any:
    cls = diffusers.StableDiffusionPipeline
    return loadstone.diffusers.from_pretrained(cls, folder, safety_checker=None)


@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_pipeline_saves_offloaded_values(folder: Path, tmp_path: Path, offload: str) -> None:
    pipe = loaded(folder)
    for name in PARTS:
        OFFLOADS[offload](getattr(pipe, name), tmp_path / name)
    pipe.save_pretrained(tmp_path / "saved")
    for name, file in PARTS.items():
        assert_same_file(tmp_path / "saved" / name / file, folder / name / file)


@pytest.mark.parametrize("name", PARTS)
def test_tensors_of_disk_groups_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    pipe = loaded(folder)
    to_groups(getattr(pipe, name), tmp_path)
    for save in (pipe.save_pretrained, getattr(pipe, name).save_pretrained):
        with pytest.raises(loadstone.OptionError, match="Save the model before this offload"):
            save(tmp_path / "saved")
        assert not (tmp_path / "saved" / name).exists()


@pytest.mark.parametrize("is_patched", [False, True])
def test_a_pipeline_of_the_library_is_saved_under_a_patch(
    folder: Path, tmp_path: Path, is_patched: bool
) -> None:
    """Control: without loadstone, the library fails."""
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    for name in PARTS:
        cpu_offload(getattr(pipe, name), CPU)
    if not is_patched:
        with pytest.raises(NotImplementedError):
            pipe.save_pretrained(tmp_path / "saved")
        return
    with loadstone.patch("diffusers", "transformers"):
        pipe.save_pretrained(tmp_path / "saved")
    for name, file in PARTS.items():
        assert_same_file(tmp_path / "saved" / name / file, folder / name / file)


def test_a_model_of_a_single_file(tmp_path: Path) -> None:
    case = by_name("wan_t2v")
    file, config = write_single_file(case, case.build(), tmp_path / "model.safetensors")
    model = loadstone.diffusers.from_single_file(case.cls, file, config=config)
    model.save_pretrained(tmp_path / "plain")
    cpu_offload(model, CPU)
    model.save_pretrained(tmp_path / "offloaded")
    name = PARTS["unet"]
    assert_same_file(tmp_path / "offloaded" / name, tmp_path / "plain" / name)


def test_copies_pickles_and_lifetime(folder: Path, tmp_path: Path) -> None:
    model = loaded(folder).unet
    cls: Any = type(model)
    own = inspect.signature(model.save_pretrained)
    assert own == inspect.signature(cls.save_pretrained.__get__(model))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.conv_in.bias.add_(1)
    copied.save_pretrained(tmp_path / "copy")
    changed = load_file(tmp_path / "copy" / PARTS["unet"])["conv_in.bias"]
    assert torch.equal(changed, model.conv_in.bias + 1)
    pickled = pickle.dumps(model)
    words = {str(argument) for _, argument, _ in pickletools.genops(pickled)}
    assert not [word for word in words if word.startswith("loadstone")]
    pickle.loads(pickled).save_pretrained(tmp_path / "pickle")
    assert_same_file(tmp_path / "pickle" / PARTS["unet"], folder / "unet" / PARTS["unet"])
    gc.collect()
    with contextlib.ExitStack() as stack:
        stack.callback(gc.enable)
        gc.disable()
        gone = weakref.ref(model)
        del model
        assert gone() is None  # the method makes no reference cycle
