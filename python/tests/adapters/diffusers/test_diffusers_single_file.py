"""Tests single files in original names, and folders: tensors equal those of a built model."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers_models import (
    CASES,
    CONSTRUCTED,
    OWN_CASES,
    Case,
    assert_same,
    by_name,
    cast_copy,
    differences,
    library_converted,
    logged_lines,
    state_of,
    write_config,
    write_header_only,
    write_single_file,
)
from safetensors.torch import save_file
from transformers_models import own_state

import loadstone
import loadstone.diffusers
from loadstone._execute.audit import last_report
from loadstone._model.walk import walk

pytest.importorskip("diffusers")
from diffusers_ltx import combined_ltx, ltx_pipeline

SMALL = [case for case in CASES if not case.is_wide]
WIDE = [case for case in CASES if case.is_wide]
# Cases for tests that do not depend on the layout; the sweep runs the other cases.
SAMPLE = (
    "wan_t2v", "wan_flf2v", "wan_animate", "autoencoder_kl", "sd35", "ltx_vae", "sana",
    "auraflow", "qwen_image",
)  # fmt: skip
# Targets that diffusers' converter does not make, because it leaves their key unchanged.
INCOMPLETE_CONVERTERS = {"wan_flf2v": {"condition_embedder.image_embedder.pos_embed"}}
NORM = "model.diffusion_model.blocks.0.norm3.weight"  # the name in the file
NORM_TARGET = "blocks.0.norm2.weight"
WAN_MAP = dict.fromkeys(
    ("rope", "patch_embedding", "condition_embedder", "blocks.0", "norm_out", "proj_out",
     "scale_shift_table"),
    "cpu",
) | {"blocks.1": "disk"}  # fmt: skip


def sampled(cases: list[Case]) -> list[Any]:
    return [
        case if case.name in SAMPLE else pytest.param(case, marks=pytest.mark.sweep)
        for case in cases
    ]


def from_file(case: Case, file: str, config: str, **options: Any) -> Any:
    return loadstone.diffusers.from_single_file(case.cls, file, config=config, **options)


# --- the corpus ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_the_librarys_converter_takes_the_layouts(case: Case) -> None:
    """diffusers' converter makes the model's names, shapes and values from our original layout."""
    if case.is_wide:
        with torch.device("meta"):
            model = case.construct()
    else:
        model = case.build()
    state = state_of(model)
    converted = library_converted(case, case.original(model), model)
    assert set(state) - set(converted) == INCOMPLETE_CONVERTERS.get(case.name, set())
    for name in state.keys() & converted.keys():
        assert converted[name].shape == state[name].shape, name
        assert case.is_wide or torch.equal(converted[name], state[name]), name


def test_differences_are_found() -> None:
    case = by_name("wan_t2v")
    first, second = case.build(), case.build()
    assert differences(first, second) == []
    with torch.no_grad():
        second.blocks[0].scale_shift_table[0, 0, 0] += 1
    second.rope.freqs_cos = second.rope.freqs_cos.bfloat16()
    found = differences(first, second)
    assert {line.split(":")[0] for line in found} == {
        "blocks.0.scale_shift_table", "rope.freqs_cos",
    }  # fmt: skip


# --- whole files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SMALL, ids=repr)
def test_original_file(tmp_path: Path, no_readers: None, case: Case) -> None:
    model = case.build()
    file, config = write_single_file(case, model, tmp_path / "model.safetensors")
    assert_same(from_file(case, file, config), model)


@pytest.mark.sweep
@pytest.mark.parametrize("case", WIDE, ids=repr)
def test_original_file_of_a_wide_model(tmp_path: Path, no_readers: None, case: Case) -> None:
    model = case.build(dtype=torch.bfloat16)
    file, config = write_single_file(case, model, tmp_path / "model.safetensors")
    found = from_file(case, file, config, torch_dtype=torch.bfloat16)
    expected = copy.deepcopy(model)
    for slot, right in zip(walk(expected), walk(case.construct()), strict=True):
        if slot.kind in CONSTRUCTED:  # constructed in float32, even if weights have another dtype
            slot.replace(right.tensor)
    assert_same(found, expected)


@pytest.mark.parametrize("case", sampled(SMALL), ids=repr)
def test_file_in_the_librarys_own_names(tmp_path: Path, no_readers: None, case: Case) -> None:
    model = case.build(seed=1)
    save_file(own_state(model), tmp_path / "own.safetensors")
    config = write_config(model, tmp_path / "config")
    assert_same(from_file(case, str(tmp_path / "own.safetensors"), config), model)


@pytest.mark.parametrize("case", [*OWN_CASES, *sampled(SMALL)], ids=repr)
def test_folder_of_shards(tmp_path: Path, no_readers: None, case: Case) -> None:
    model = case.build(seed=2)
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    assert_same(loadstone.diffusers.from_pretrained(case.cls, str(tmp_path / "model")), model)


# --- dtypes --------------------------------------------------------------------------------------

DTYPES = (torch.bfloat16, torch.float16)
DTYPE_CASES = ("wan_i2v", "wan_animate", "cosmos", "qwen_image", "sd35", "ltx_vae")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", DTYPE_CASES)
def test_dtype_leaves_tables_and_declared_modules(
    tmp_path: Path, no_readers: None, name: str, dtype: torch.dtype
) -> None:
    case = by_name(name)
    model = case.build()
    file, config = write_single_file(case, model, tmp_path / "model.safetensors")
    found = from_file(case, file, config, torch_dtype=dtype)
    assert_same(found, cast_copy(case, model, dtype))
    if name.startswith("wan"):
        assert found.rope.freqs_cos.dtype == torch.float32
        assert found.condition_embedder.time_embedder.linear_1.weight.dtype == torch.float32
        assert found.blocks[0].attn1.to_q.weight.dtype == dtype


def test_the_librarys_own_load_rounds_them(tmp_path: Path) -> None:
    """Control for the test above: tensors that diffusers itself loads would fail it."""
    case = by_name("wan_i2v")
    model = case.build()
    file, config = write_single_file(case, model, tmp_path / "model.safetensors")
    library = case.cls.from_single_file(file, config=config, torch_dtype=torch.bfloat16)
    wrong = {line.split(":")[0] for line in differences(library, cast_copy(
        case, model, torch.bfloat16))}  # fmt: skip
    assert {"rope.freqs_cos", "blocks.0.scale_shift_table"} <= wrong


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [by_name("wan_i2v"), *OWN_CASES], ids=repr)
def test_folder_in_another_dtype(tmp_path: Path, case: Case, dtype: torch.dtype) -> None:
    """loadstone keeps declared modules in float32, as diffusers' ``from_pretrained`` does."""
    model = case.build()
    model.save_pretrained(tmp_path / "model")
    found = loadstone.diffusers.from_pretrained(
        case.cls, str(tmp_path / "model"), torch_dtype=dtype
    )
    assert_same(found, case.cls.from_pretrained(str(tmp_path / "model"), torch_dtype=dtype))


# --- devices -------------------------------------------------------------------------------------


def wan_inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "hidden_states": torch.randn(1, 16, 1, 4, 4, generator=generator),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": torch.randn(1, 4, 32, generator=generator),
    }


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        made: torch.Tensor = model(**wan_inputs()).sample
    return made


def test_device_map_with_disk(tmp_path: Path, no_readers: None) -> None:
    case = by_name("wan_t2v")
    model = case.build()
    file, config = write_single_file(case, model, tmp_path / "model.safetensors")
    found = from_file(
        case, file, config, device_map=dict(WAN_MAP), offload_folder=tmp_path / "offload"
    )
    assert found.hf_device_map == WAN_MAP
    on_meta = {slot.name for slot in walk(found) if slot.tensor.is_meta}
    assert on_meta == {name for name in model.state_dict() if name.startswith("blocks.1.")}
    assert loadstone.audit(found).ok
    assert torch.equal(outputs(found), outputs(model))
    torch.testing.assert_close(found.rope.freqs_cos, model.rope.freqs_cos, rtol=0, atol=0)


def test_device_map_with_disk_in_another_dtype(tmp_path: Path) -> None:
    """accelerate's hooks cast the tensors from disk to the requested dtype."""
    case = by_name("wan_t2v")
    file, config = write_single_file(case, case.build(), tmp_path / "model.safetensors")
    options = {"device_map": dict(WAN_MAP), "offload_folder": tmp_path / "offload"}
    found = from_file(case, file, config, torch_dtype=torch.bfloat16, **options)
    whole = from_file(case, file, config, torch_dtype=torch.bfloat16)
    dtypes = {name: value.dtype for name, value in whole.named_parameters()}
    assert {name: value.dtype for name, value in found.named_parameters()} == dtypes
    assert set(dtypes.values()) == {torch.bfloat16, torch.float32}
    inputs = wan_inputs()
    for name in ("hidden_states", "encoder_hidden_states"):
        inputs[name] = inputs[name].bfloat16()
    with torch.no_grad():
        assert torch.equal(found(**inputs).sample, whole(**inputs).sample)


@pytest.mark.parametrize(
    "options",
    [{"low_cpu_mem_usage": False}, {"disable_mmap": True}, {"device": "cpu"}],
    ids=str,
)
def test_options_of_the_library(tmp_path: Path, no_readers: None, options: Any) -> None:
    case = by_name("wan_t2v")
    model = case.build()
    file, config = write_single_file(case, model, tmp_path / "model.safetensors")
    assert_same(from_file(case, file, config, **options), model)


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, "auto"], ids=str)
def test_device_map_in_memory(tmp_path: Path, no_readers: None, device_map: Any) -> None:
    case = by_name("wan_t2v")
    model = case.build()
    file, config = write_single_file(case, model, tmp_path / "model.safetensors")
    assert_same(from_file(case, file, config, device_map=device_map), model)


# --- missing tensors ------------------------------------------------------------------------------


def without(case: Case, model: Any, file: Path, *names: str) -> tuple[str, str]:
    state = {name: tensor for name, tensor in case.original(model).items() if name not in names}
    assert len(state) == len(case.original(model)) - len(names)
    save_file(state, file)
    return str(file), write_config(model, file.parent / "config")


def bytes_read() -> int:
    """Return the bytes that this process read, including mapped pages of files."""
    read = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    status = Path("/proc/self/status").read_text().splitlines()
    mapped = next(int(line.split()[1]) for line in status if line.startswith("RssFile"))
    return int(read["rchar"]) + 1024 * mapped


def test_missing_weight_is_named_before_data_is_read(tmp_path: Path, no_readers: None) -> None:
    """The data of this 1 GB file is a hole, so a load that read it would succeed with zeros."""
    wan = by_name("wan_t2v")
    case = dataclasses.replace(wan, changes=wan.changes | {"ffn_dim": 2_000_000})
    with torch.device("meta"):
        model = case.construct()
    state = case.original(model)
    del state[NORM]
    file = write_header_only(state, tmp_path / "wan.safetensors")
    assert Path(file).stat().st_size > 800_000_000
    config = write_config(model, tmp_path / "config")
    before = bytes_read()
    with pytest.raises(loadstone.PlanError) as raised:
        from_file(case, file, config, torch_dtype=torch.bfloat16)
    assert bytes_read() - before < 100_000_000
    assert raised.value.code == "plan.missing"
    errors = [finding for finding in raised.value.findings if finding.severity == "error"]
    assert [finding.target for finding in errors] == ["blocks.0.norm2.weight"]


@pytest.mark.parametrize("case", sampled(SMALL), ids=repr)
def test_missing_weight_of_every_layout(tmp_path: Path, no_readers: None, case: Case) -> None:
    """The error names targets even if the converter itself fails on the missing tensor."""
    model = case.build()
    state = case.original(model)
    names = set(model.state_dict())
    gone = list(state)[len(state) // 2]
    del state[gone]
    save_file(state, tmp_path / "model.safetensors")
    config = write_config(model, tmp_path / "config")
    with pytest.raises(loadstone.PlanError) as raised:
        from_file(case, str(tmp_path / "model.safetensors"), config)
    assert raised.value.code == "plan.missing"
    errors = [item for item in raised.value.findings if item.severity == "error"]
    assert errors
    assert names.issuperset(item.target for item in errors)


def test_bytes_read_are_counted(tmp_path: Path) -> None:
    """Control: ``bytes_read`` counts a read of a file that is a hole."""
    file = tmp_path / "hole"
    with file.open("wb") as out:
        out.truncate(200_000_000)
    before = bytes_read()
    file.read_bytes()
    assert bytes_read() - before >= 200_000_000


def test_missing_weight_of_wan(tmp_path: Path, no_readers: None) -> None:
    case = by_name("wan_i2v")
    file, config = without(case, case.build(), tmp_path / "model.safetensors", NORM)
    with pytest.raises(loadstone.PlanError, match=NORM_TARGET) as raised:
        from_file(case, file, config)
    assert raised.value.code == "plan.missing"
    assert len(raised.value.findings) == 1
    assert NORM.removeprefix("model.diffusion_model.") in str(raised.value)  # name in the file


@pytest.mark.parametrize("policy", ["initialise", "zeros"])
def test_missing_weight_is_filled_on_request(tmp_path: Path, no_readers: None, policy: str) -> None:
    case = by_name("wan_t2v")
    model = case.build()
    file, config = without(case, model, tmp_path / "model.safetensors", NORM)
    found = from_file(case, file, config, missing=policy)
    expected = copy.deepcopy(model)
    with torch.no_grad():
        expected.blocks[0].norm2.weight.fill_(1.0 if policy == "initialise" else 0.0)
    assert_same(found, expected)
    origins = loadstone.audit(found).provenance
    filled = [name for name, item in origins.items() if item.origin in ("initialiser", "zeros")]
    assert filled == [NORM_TARGET]
    told = [item for item in last_report(found).findings if item.severity == "warning"]
    assert [(item.code, item.target) for item in told] == [("plan.missing", NORM_TARGET)]
    assert "256 B" in told[0].message
    assert not torch.equal(outputs(found), outputs(model))  # control: the fill has an effect


def test_missing_weights_are_filled_by_name(tmp_path: Path, no_readers: None) -> None:
    case = by_name("wan_t2v")
    model = case.build()
    other, third = NORM.replace("blocks.0", "blocks.1"), NORM.replace("weight", "bias")
    file, config = without(case, model, tmp_path / "two.safetensors", NORM, other)
    policies = {r"blocks\.0\..*": "zeros", r".*norm2\.weight": "initialise"}
    found = from_file(case, file, config, missing=policies)
    assert torch.equal(found.blocks[0].norm2.weight, torch.zeros(64))
    assert torch.equal(found.blocks[1].norm2.weight, torch.ones(64))
    file, config = without(case, model, tmp_path / "three.safetensors", NORM, other, third)
    with pytest.raises(loadstone.PlanError, match="norm2") as raised:
        from_file(case, file, config, missing={r".*\.weight": "zeros"})
    errors = [item.target for item in raised.value.findings if item.severity == "error"]
    assert errors == ["blocks.0.norm2.bias"]


def test_unexpected_key_is_warned_about(tmp_path: Path, no_readers: None) -> None:
    case = by_name("wan_t2v")
    model = case.build()
    state = case.original(model) | {"model.diffusion_model.surplus.weight": torch.ones(3)}
    save_file(state, tmp_path / "model.safetensors")
    config = write_config(model, tmp_path / "config")
    with logged_lines() as lines:
        assert_same(from_file(case, str(tmp_path / "model.safetensors"), config), model)
    assert any("surplus.weight" in line for line in lines)


# --- several components in one file --------------------------------------------------------------


@pytest.mark.parametrize("order", [("ltx", "ltx_vae"), ("ltx_vae", "ltx")], ids=str)
def test_combined_file_by_its_components(
    tmp_path: Path, no_readers: None, order: tuple[str, str]
) -> None:
    file, *models = combined_ltx(tmp_path)
    rights = dict(zip(("ltx", "ltx_vae"), models, strict=True))
    for name in order:
        folder = tmp_path / "config" / ("vae" if name == "ltx_vae" else "transformer")
        assert_same(from_file(by_name(name), file, str(folder)), rights[name])


def test_combined_file_as_a_pipeline(tmp_path: Path, no_readers: None) -> None:
    """Every component gets all tensors, although diffusers' converters empty their input."""
    import diffusers

    file, whole = ltx_pipeline(tmp_path)
    pipe = loadstone.diffusers.from_single_file(
        diffusers.LTXPipeline,
        file,
        config=str(tmp_path / "config"),
        text_encoder=None,
        tokenizer=None,
    )
    assert_same(pipe.transformer, whole.transformer)
    assert_same(pipe.vae, whole.vae)
