"""Tests options of direct calls: dry runs, memory limits of given maps, and filtered warnings."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers_gguf import BLOCK_CASES, File, Kind, quantization
from diffusers_models import by_name, write_single_file
from diffusers_pipelines import stable_diffusion

import loadstone

CASE = by_name("wan_t2v")
MAP = {"": "cpu", "blocks.1": "disk"}


@pytest.fixture
def file(tmp_path: Path) -> tuple[str, str]:
    return write_single_file(CASE, CASE.build(), tmp_path / "model.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    CASE.build().save_pretrained(tmp_path / "folder")
    return tmp_path / "folder"


def load(source: Any, **options: Any) -> Any:
    if isinstance(source, tuple):
        return loadstone.diffusers.from_single_file(
            CASE.cls, source[0], config=source[1], **options
        )
    return loadstone.diffusers.from_pretrained(CASE.cls, source, **options)


@pytest.mark.parametrize("entry", ["file", "folder"])
def test_a_dry_run_returns_the_plan_of_the_load(
    entry: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    source = request.getfixturevalue(entry)
    options = {"device_map": MAP, "offload_folder": tmp_path / "off"}
    plan = load(source, dry_run=True, **options)
    assert isinstance(plan, loadstone.Plan)
    assert plan.ok
    assert not (tmp_path / "off").exists()
    model = load(source, **options)
    planned = {target.name: (target.device, target.dtype) for target in plan.targets}
    assert planned.keys() >= model.state_dict().keys()
    assert {name for name, (device, _) in planned.items() if device == "disk"} == {
        name for name, tensor in model.named_parameters() if tensor.is_meta
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_dry_run_keeps_blocks(tmp_path: Path, dtype: torch.dtype) -> None:
    blocks = File(tmp_path, BLOCK_CASES[0], lambda index: (Kind.Q8_0, Kind.F16)[index % 2])
    options = {"quantization_config": quantization(), "torch_dtype": dtype}
    plan = blocks.load(dry_run=True, **options)
    model = blocks.load(**options)
    kept = {name for name, value in model.named_parameters() if hasattr(value, "quant_type")}
    assert kept
    assert {target.name for target in plan.targets if target.dtype == "U8"} == kept
    sizes = {target.name: target.nbytes for target in plan.targets}
    assert sizes == {name: value.nbytes for name, value in model.state_dict().items()} | {
        name: value.nbytes for name, value in model.named_buffers()
    }
    assert "Q8_0" in str(plan)


def test_a_dry_run_reports_what_is_missing(folder: Path) -> None:
    file = folder / "diffusion_pytorch_model.safetensors"
    tensors = loadstone.load_file(file)
    tensors.pop("proj_out.bias")
    loadstone.torch.save_file(tensors, file, {"format": "pt"})
    plan = load(folder, dry_run=True)
    assert [finding.target for finding in plan.findings if finding.severity == "error"] == [
        "proj_out.bias"
    ]


def test_a_dry_run_of_a_pipeline_is_refused(tmp_path: Path) -> None:
    stable_diffusion(tmp_path).save_pretrained(tmp_path / "pipe")
    with pytest.raises(loadstone.OptionError, match="of each model's own class") as caught:
        loadstone.diffusers.from_pretrained(
            diffusers.StableDiffusionPipeline, tmp_path / "pipe", dry_run=True
        )
    assert caught.value.field == "dry_run"
    cls = diffusers.AutoencoderKL
    assert loadstone.diffusers.from_pretrained(cls, tmp_path / "pipe/vae", dry_run=True).ok


@pytest.mark.parametrize("entry", ["file", "folder"])
def test_a_given_map_must_fit_the_limits(
    entry: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    source = request.getfixturevalue(entry)
    options: dict[str, Any] = {"device_map": MAP, "offload_folder": tmp_path / "off"}
    with pytest.raises(loadstone.PlanError) as caught:
        load(source, **options, max_memory={"cpu": 1000})
    assert caught.value.code == "plan.over_budget"
    assert loadstone.audit(load(source, **options, max_memory={"cpu": "1GiB"})).ok
    computed = load(source, **options | {"device_map": "auto"}, max_memory={"cpu": "40kB"})
    assert loadstone.audit(computed).ok  # such a map fits the tensors; staging comes on top


def test_limits_of_a_pipelines_given_map_are_refused(tmp_path: Path) -> None:
    stable_diffusion(tmp_path).save_pretrained(tmp_path / "pipe")

    def load_pipe(**options: Any) -> Any:
        return loadstone.diffusers.from_pretrained(
            diffusers.StableDiffusionPipeline, tmp_path / "pipe", max_memory={"cpu": "1GiB"},
            offload_folder=tmp_path / "off", **options,
        )  # fmt: skip

    with pytest.raises(loadstone.OptionError, match="or leave max_memory out") as caught:
        load_pipe(device_map={"vae": "disk"})
    assert caught.value.field == "max_memory"
    load_pipe(device_map="sequential")


@pytest.mark.parametrize("is_patched", [False, True])
@pytest.mark.parametrize("entry", ["file", "folder"])
def test_limits_without_a_map(entry: str, is_patched: bool, request: pytest.FixtureRequest) -> None:
    source = request.getfixturevalue(entry)

    def loaded(limit: Any) -> Any:
        limits = {"max_memory": {"cpu": limit}}
        if not is_patched:
            return load(source, **limits)
        with loadstone.patch("diffusers"):
            if isinstance(source, tuple):
                return CASE.cls.from_single_file(source[0], config=source[1], **limits)
            return CASE.cls.from_pretrained(source, **limits)

    with pytest.raises(loadstone.PlanError, match=r"its limit is 1\.0 kB") as caught:
        loaded(1000)
    assert caught.value.code == "plan.over_budget"
    assert loadstone.audit(loaded("1GiB")).ok


@pytest.mark.parametrize("is_patched", [False, True])
def test_limits_of_a_pipeline_need_a_map(tmp_path: Path, is_patched: bool) -> None:
    stable_diffusion(tmp_path).save_pretrained(tmp_path / "pipe")
    cls, limits = diffusers.StableDiffusionPipeline, {"cpu": "1GiB"}

    def loaded(**options: Any) -> Any:
        if not is_patched:
            return loadstone.diffusers.from_pretrained(cls, tmp_path / "pipe", **options)
        with loadstone.patch("diffusers", "transformers"):
            return cls.from_pretrained(tmp_path / "pipe", **options)

    with pytest.raises(loadstone.OptionError, match="pass device_map too") as caught:
        loaded(max_memory=limits)
    assert caught.value.field == "max_memory"
    loaded(max_memory=limits, device_map="auto")


@pytest.mark.parametrize("name", ["torch_dtype", "dtype"])
@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", "BF16", torch.bfloat16])
@pytest.mark.parametrize("entry", ["file", "folder"])
def test_a_dtype_may_be_a_name(
    entry: str, dtype: Any, name: str, request: pytest.FixtureRequest
) -> None:
    """diffusers alone loads float32 for any name."""
    source = request.getfixturevalue(entry)
    assert load(source, **{name: dtype}).dtype == torch.bfloat16
    with loadstone.patch("diffusers"):
        if isinstance(source, tuple):
            model = CASE.cls.from_single_file(source[0], config=source[1], **{name: dtype})
        else:
            model = CASE.cls.from_pretrained(source, **{name: dtype})
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["auto", "bfloat61", "int8", torch.int8, 16])
@pytest.mark.parametrize("entry", ["file", "folder"])
def test_other_dtypes_are_refused(entry: str, dtype: Any, request: pytest.FixtureRequest) -> None:
    with pytest.raises(loadstone.OptionError, match="need a floating-point dtype") as caught:
        load(request.getfixturevalue(entry), torch_dtype=dtype)
    assert (caught.value.field, caught.value.found) == ("torch_dtype", repr(dtype))


def test_dtypes_of_components_may_be_names(tmp_path: Path) -> None:
    stable_diffusion(tmp_path).save_pretrained(tmp_path / "pipe")

    def load_pipe(dtypes: dict[str, Any]) -> Any:
        return loadstone.diffusers.from_pretrained(
            diffusers.StableDiffusionPipeline, tmp_path / "pipe", torch_dtype=dtypes
        )

    pipe = load_pipe({"unet": "bfloat16", "default": "float16"})
    assert (pipe.unet.dtype, pipe.vae.dtype) == (torch.bfloat16, torch.float16)
    with pytest.raises(loadstone.OptionError, match="did you mean 'unet'") as caught:
        load_pipe({"unett": "bfloat16"})
    assert caught.value.field == "torch_dtype"


@pytest.mark.parametrize("entry", ["file", "folder"])
def test_tensors_in_a_map_cause_no_warning(
    entry: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """``scale_shift_table`` is a parameter of the model itself, so the map must name it."""
    source = request.getfixturevalue(entry)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load(source, device_map=MAP, offload_folder=tmp_path / "off")
    assert "scale_shift_table" in model.hf_device_map


def test_an_adapter_for_blocks_names_their_encoding(tmp_path: Path) -> None:
    blocks = File(tmp_path, BLOCK_CASES[0], lambda index: (Kind.Q8_0, Kind.Q4_0)[index % 2])
    model = blocks.load(quantization_config=quantization(), torch_dtype=torch.bfloat16)
    weights = {
        name: type(value.quant_type)(value.quant_type).name
        for name, value in model.named_parameters()
        if hasattr(value, "quant_type") and name.endswith((".to_q.weight", ".to_v.weight"))
    }
    assert set(weights.values()) == {"Q8_0", "Q4_0"}
    rank_1 = {}
    for name in weights:
        rows, columns = model.get_submodule(name.removesuffix(".weight")).weight.quant_shape
        rank_1[name.replace(".weight", ".lora_A.weight")] = torch.ones(1, columns)
        rank_1[name.replace(".weight", ".lora_B.weight")] = torch.ones(rows, 1)
    loadstone.torch.save_file(rank_1, tmp_path / "lora.safetensors")
    plan = blocks.load(
        quantization_config=quantization(), lora=tmp_path / "lora.safetensors", dry_run=True
    )
    messages = [finding.message for finding in plan.findings if finding.code == "merge.adapter"]
    assert len(messages) == len(weights)
    for name, encoding in weights.items():
        [message] = [each for each in messages if name.removesuffix(".weight") in each]
        assert f"stores it as {encoding}, but" in message
