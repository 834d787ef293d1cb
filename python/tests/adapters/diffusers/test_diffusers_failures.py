"""Tests that errors of wrong calls name the path, the files there, and the next step."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from command import run
from diffusers_gguf import BLOCK_CASES, File, Kind
from diffusers_models import by_name, write_single_file
from diffusers_pipelines import stable_diffusion
from safetensors.torch import save_file

import loadstone
import loadstone.diffusers

CASE = by_name("wan_t2v")
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder, a single file with its config, and a pipeline."""
    root = tmp_path_factory.mktemp("made")
    model = CASE.build()
    model.save_pretrained(root / "model")
    write_single_file(CASE, model, root / "single" / "model.safetensors")
    stable_diffusion(root / "pipe_parts").save_pretrained(root / "pipe")
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def folder(source: Path, cls: Any = None, **options: Any) -> Any:
    return loadstone.diffusers.from_pretrained(cls or CASE.cls, source, **options)


def pipeline(source: Path, **options: Any) -> Any:
    return folder(source, diffusers.StableDiffusionPipeline, **options)


def single(root: Path, file: str = "single/model.safetensors", **options: Any) -> Any:
    options = {"config": str(root / "single/config")} | options
    return loadstone.diffusers.from_single_file(CASE.cls, str(root / file), **options)


def flux(root: Path, file: Path) -> Any:
    model = diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=1)
    model.save_config(root / "flux")
    cls = diffusers.FluxTransformer2DModel
    return loadstone.diffusers.from_single_file(cls, str(file), config=str(root / "flux"))


def adapter(path: Path) -> str:
    module = "transformer.blocks.0.attn1.to_q"
    shapes = {f"{module}.lora_A.weight": (4, 64), f"{module}.lora_B.weight": (64, 4)}
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, path)
    return path.name


def remove(path: Path) -> Path:
    path.unlink() if path.is_file() else shutil.rmtree(path)
    return path


def empty(path: Path) -> Path:
    path.mkdir()
    return path


def spoil(path: Path) -> Path:
    path.write_text('{"a": ')
    return path


VAE = diffusers.AutoencoderKL

# Calls; then the code of the error, and parts of its text.
CASES: dict[str, tuple[Callable[[Path], Any], str, tuple[str, ...]]] = {
    "no class of diffusers": (
        lambda root: folder(root / "model", torch.nn.Linear),
        "plan.options",
        ("cls: ", "a model or pipeline class of diffusers with from_pretrained()"),
    ),
    "wrong class": (
        lambda root: folder(root / "model", VAE),
        "plan.options",
        ("model/config.json: ", "call from_pretrained of WanTransformer3DModel"),
    ),
    "a class without the function": (
        lambda root: loadstone.diffusers.from_single_file(diffusers.WanPipeline, str(root)),
        "plan.options",
        ("cls: this has no function from_single_file()", "found WanPipeline"),
    ),
    "wrong class whose construction fails": (
        lambda root: folder(root / "model", diffusers.FluxTransformer2DModel),
        "plan.options",
        ("model/config.json: ", "call from_pretrained of WanTransformer3DModel"),
    ),
    "config of a different class": (
        lambda root: single(root, config=str(root / "pipe/vae")),
        "plan.options",
        ("vae/config.json: ", "call from_single_file of AutoencoderKL"),
    ),
    "file of a different class": (
        lambda root: flux(root, root / "single/model.safetensors"),
        "plan.options",
        ("model.safetensors: diffusers failed to load this as FluxTransformer2DModel", "Error: "),
    ),
    "wrong pipeline": (
        lambda root: folder(root / "pipe", diffusers.FluxPipeline),
        "plan.options",
        ("pipe/model_index.json: ", "call from_pretrained of StableDiffusionPipeline"),
    ),
    "an adapter as a model": (
        lambda root: single(root, adapter(root / "lora.safetensors")),
        "plan.missing",
        ("lora.safetensors' is a LoRA adapter, not a model", "and the model lacks", "lora="),
    ),
    "a misspelled device": (
        lambda root: folder(root / "model", device_map="dsk"),
        "plan.device_map",
        ("device_map: ", "unknown device 'dsk'; did you mean 'disk'?"),
    ),
    "a misspelled device of a module": (
        lambda root: single(root, device_map={"": "cpu", "blocks.0": "dsk"}),
        "plan.device_map",
        ("'blocks.0': unknown device 'dsk'; did you mean 'disk'?",),
    ),
    "an absent device": (
        lambda root: single(root, device_map="cuda:77"),
        "plan.device_map",
        ("this machine does not have this device", "found cuda:77", "expected a device of this"),
    ),
    "limits without devices": (
        lambda root: folder(root / "model", device_map="auto", max_memory="6GiB"),
        "plan.options",
        ("max_memory: ", "found str", "a mapping of devices to bytes"),
    ),
    "a subfolder that is a number": (
        lambda root: folder(root / "model", subfolder=1),
        "plan.options",
        ("subfolder: ", "found int", "a folder's name"),
    ),
    "wrong subfolder": (
        lambda root: folder(root / "pipe", VAE, subfolder="vea"),
        "io.not_found",
        ("pipe: ", "no subfolder 'vea'", "expected text_encoder, unet, vae"),
    ),
    "the folder of a pipeline": (
        lambda root: folder(root / "pipe", VAE),
        "format.no_checkpoint",
        ("pass the subfolder of the model", "expected text_encoder, unet, vae"),
    ),
    "the folder of a model": (
        lambda root: pipeline(root / "pipe/vae"),
        "format.no_checkpoint",
        ("pipe/vae: ", "call from_pretrained of AutoencoderKL"),
    ),
    "no config": (
        lambda root: folder(remove(root / "model/config.json").parent),
        "io.not_found",
        ("model: the folder has no config.json", f"found {WEIGHTS}"),
    ),
    "empty folder": (
        lambda root: folder(empty(root / "empty")),
        "io.not_found",
        ("empty: the folder has no config.json", "found an empty folder"),
    ),
    "empty folder, pipeline": (
        lambda root: pipeline(empty(root / "empty")),
        "io.not_found",
        ("the folder has no model_index.json", "found an empty folder"),
    ),
    "absent folder": (
        lambda root: folder(root / "absent"),
        "io.not_found",
        ("absent: neither a folder, nor a repository that diffusers can open",),
    ),
    "a file as a folder": (
        lambda root: folder(root / "single/model.safetensors"),
        "format.no_checkpoint",
        ("model.safetensors: this is a file: call from_single_file",),
    ),
    "absent file": (
        lambda root: single(root, "absent.safetensors"),
        "io.not_found",
        ("absent.safetensors: there is no such file",),
    ),
    "a folder as a file": (
        lambda root: single(root, "model"),
        "format.no_checkpoint",
        ("model: this is a folder: pass one of its files", f"found config.json, {WEIGHTS}"),
    ),
    "no weights": (
        lambda root: folder(remove(root / "model" / WEIGHTS).parent),
        "format.no_checkpoint",
        ("model: the folder has no weights", "found none", f"expected {WEIGHTS}"),
    ),
    "wrong variant": (
        lambda root: folder(root / "model", variant="fp16"),
        "format.no_checkpoint",
        ("of the variant 'fp16'", f"found {WEIGHTS}", "diffusion_pytorch_model.fp16.safetensors"),
    ),
    "wrong variant, pipeline": (
        lambda root: pipeline(root / "pipe", variant="fp16"),
        "format.no_checkpoint",
        ("pipe: the folder has no weights of the variant 'fp16'", f"unet/{WEIGHTS}"),
    ),
    "broken config": (
        lambda root: folder(spoil(root / "model/config.json").parent),
        "format.config",
        ("model/config.json: the file is not valid JSON", "line 1"),
    ),
    "broken config of a single file": (
        lambda root: single(root, config=str(spoil(root / "single/config/config.json").parent)),
        "format.config",
        ("config/config.json: the file is not valid JSON", "line 1"),
    ),
    "broken config of a component": (
        lambda root: pipeline(spoil(root / "pipe/unet/config.json").parents[1]),
        "format.config",
        ("unet/config.json: the file is not valid JSON", "line 1"),
    ),
    "no folder of a component": (
        lambda root: pipeline(remove(root / "pipe/vae").parent),
        "io.not_found",
        ("lists the component 'vae' (AutoencoderKL)", "pass vae=None", "found text_encoder, unet"),
    ),
    "absent config": (
        lambda root: single(root, config=str(root / "absent")),
        "io.not_found",
        ("absent: neither a folder, nor a repository",),
    ),
    "a config that is a dictionary": (
        lambda root: single(root, config={"num_layers": 2}),
        "plan.options",
        ("config: ", "found dict", "a folder, or the name of a repository"),
    ),
    "a quantization that is a name": (
        lambda root: folder(root / "model", quantization_config="nf4"),
        "plan.options",
        ("quantization_config: ", "BitsAndBytesConfig"),
    ),
    "a quantization that is a dictionary": (
        lambda root: single(root, quantization_config={"load_in_4bit": True}),
        "plan.options",
        ("quantization_config: ", "found dict", "GGUFQuantizationConfig(compute_dtype="),
    ),
    "a quantization of a pipeline that is a dictionary": (
        lambda root: pipeline(root / "pipe", quantization_config={"load_in_4bit": True}),
        "plan.options",
        ("quantization_config: ", "found dict", "PipelineQuantizationConfig"),
    ),
    "misspelled component": (
        lambda root: pipeline(root / "pipe", unett=None),
        "plan.options",
        ("unknown argument 'unett'; did you mean 'unet'?",),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_error_names_the_cause(case: str, root: Path, monkeypatch: Any) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    call, code, parts = CASES[case]
    with pytest.raises(loadstone.Error) as caught:
        call(root)
    assert caught.value.code == code, caught.value
    for part in parts:
        assert part in str(caught.value)


def test_an_adapter_as_a_model_is_one_error(root: Path) -> None:
    file = root / adapter(root / "lora.safetensors")
    loadstone.save_skeleton(CASE.construct(), root / "skeleton.json")
    done = run("load", file, "--skeleton", root / "skeleton.json")
    assert done.returncode == 1 and done.stderr.count("is a LoRA adapter, not a model") == 1
    assert len(done.stderr.splitlines()) == 2
    for load in (
        lambda: loadstone.load(CASE.construct(), file),
        lambda: loadstone.load(CASE.construct(), file, rules="diffusers"),
        lambda: single(root, file.name),
    ):
        with pytest.raises(loadstone.PlanError, match="is a LoRA adapter, not a model") as caught:
            load()
        (error,) = (each for each in caught.value.findings if each.severity == "error")
        assert error.code == "plan.missing" and "lora=" in error.suggestion


def test_advice_about_folders_works(root: Path) -> None:
    assert loadstone.audit(folder(root / "model")).ok
    assert loadstone.audit(single(root, f"model/{WEIGHTS}")).ok
    assert loadstone.audit(single(root)).ok
    assert loadstone.audit(folder(root / "pipe", VAE, subfolder="vae")).ok
    assert loadstone.audit(folder(root / "pipe/vae", VAE)).ok
    remove(root / "pipe/vae")
    assert pipeline(root / "pipe", vae=None).vae is None
    assert loadstone.audit(single(root, config=root / "single/config")).ok  # a Path


def test_errors_of_a_patch_are_the_librarys(root: Path) -> None:
    with loadstone.patch("diffusers"), pytest.raises(OSError) as caught:
        CASE.cls.from_pretrained(remove(root / "model/config.json").parent)
    assert not isinstance(caught.value, loadstone.Error)


def test_a_torch_file_next_to_safetensors_is_not_read(root: Path) -> None:
    (root / "model/diffusion_pytorch_model.bin").write_bytes(b"broken")
    assert loadstone.audit(folder(root / "model")).ok


PROGRAM = """
import sys
sys.modules["gguf"] = None
import diffusers, loadstone, loadstone.diffusers
try:
    loadstone.diffusers.from_single_file(getattr(diffusers, sys.argv[1]), *sys.argv[2:3],
                                         config=sys.argv[3])
except loadstone.Error as error:
    print(error)
"""


def test_without_gguf_the_error_names_the_package(tmp_path: Path) -> None:
    blocks = File(tmp_path, BLOCK_CASES[0], lambda _: Kind.Q8_0)
    arguments = [blocks.case.class_name, str(blocks.path), blocks.config]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True
    )
    assert "pip install gguf" in done.stdout
    assert "[plan.options]" in done.stdout
