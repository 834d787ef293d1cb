"""Tests GGUF files for diffusers: packed, or dequantized to gguf-py's values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from diffusers_gguf import (
    BLOCK_CASES,
    PLAIN,
    SCALES,
    File,
    Kind,
    assert_same,
    differences,
    mixed,
    quantization,
)
from diffusers_models import (
    CASES,
    Case,
    by_name,
    cast_copy,
    refuse,
)
from safetensors.torch import save_file

import loadstone

diffusers = pytest.importorskip("diffusers")

# Classes whose converter only renames, and classes whose converter splits, joins and swaps rows.
SAMPLE = ("wan_i2v", "wan_vace", "ltx", "sana", "auraflow", "cosmos", "hidream")
WAN = BLOCK_CASES[0]


def rows(kinds: Any, cases: Any) -> list[Any]:
    """Return each case with each type; mark most cases outside SAMPLE as sweep."""
    return [
        pytest.param(
            case,
            kind,
            id=f"{case}-{kind.name}",
            marks=()
            if case is WAN
            or (case in BLOCK_CASES and kind == Kind.Q4_K)
            or (case.name in SAMPLE and kind != Kind.F16)
            else pytest.mark.sweep,
        )
        for case in cases
        for kind in kinds
    ]


SMALL = [case for case in CASES if not case.is_wide and case.name != "wan_flf2v"]
ALL = [*rows(PLAIN, SMALL), *rows(SCALES, BLOCK_CASES)]


Files = Callable[[Case, Kind], File]


@pytest.fixture(scope="module")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Write a file of one block type once; tests only read it."""
    made: dict[tuple[str, Kind], File] = {}

    def file(case: Case, kind: Kind) -> File:
        if (case.name, kind) not in made:
            made[case.name, kind] = File(tmp_path_factory.mktemp("file"), case, lambda _: kind)
        return made[case.name, kind]

    return file


# --- dequantized ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case, kind", ALL)
def test_dequantized(
    file_of: Files, monkeypatch: pytest.MonkeyPatch, case: Case, kind: Kind
) -> None:
    """Without a quantization config, values are gguf-py's float32, rounded once to the dtype."""
    file = file_of(case, kind)
    reference = file.reference()
    monkeypatch.setattr(gguf, "GGUFReader", refuse)
    assert_same(file.load(), reference)
    for dtype in (torch.bfloat16, torch.float16):
        assert_same(file.load(torch_dtype=dtype), cast_copy(case, reference, dtype))


def test_the_library_refuses_without_a_config(tmp_path: Path) -> None:
    """Without a config diffusers rejects the file, so ``test_dequantized`` uses gguf-py."""
    file = File(tmp_path, WAN, lambda _: Kind.Q8_0)
    with pytest.raises(ValueError, match="shape"):
        file.library_load()


# --- packed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case, kind", ALL)
def test_packed(file_of: Files, monkeypatch: pytest.MonkeyPatch, case: Case, kind: Kind) -> None:
    """The quantization config packs parameters, as in diffusers' own load."""
    file = file_of(case, kind)
    expected = file.library_load(quantization_config=quantization())
    monkeypatch.setattr(gguf, "GGUFReader", refuse)
    assert_same(file.load(quantization_config=quantization()), expected)


@pytest.mark.parametrize("case", BLOCK_CASES, ids=repr)
def test_mixed_types(tmp_path: Path, case: Case) -> None:
    file = File(tmp_path, case, mixed)
    assert len(set(file.tensors.kinds.values())) == 4
    expected = file.library_load(quantization_config=quantization(torch.float16))
    assert_same(file.load(quantization_config=quantization(torch.float16)), expected)
    assert_same(file.load(torch_dtype=torch.bfloat16), cast_copy(
        case, file.reference(), torch.bfloat16))  # fmt: skip


def test_bytes_of_the_file_are_the_parameters(tmp_path: Path) -> None:
    file = File(tmp_path, WAN, mixed)
    found = file.load(quantization_config=quantization())
    held = file.tensors.data["model.diffusion_model.blocks.0.ffn.0.weight"]
    kind = file.tensors.kinds["model.diffusion_model.blocks.0.ffn.0.weight"]
    parameter = found.blocks[0].ffn.net[0].proj.weight
    assert kind in SCALES
    assert isinstance(parameter, diffusers.quantizers.gguf.utils.GGUFParameter)
    assert parameter.quant_type == kind
    assert parameter.dtype == torch.uint8
    assert torch.equal(parameter.as_tensor(), torch.from_numpy(held))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "kind",
    [*SCALES, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1],
    ids=lambda kind: kind.name,
)
def test_modules_that_are_not_to_be_packed(file_of: Files, kind: Kind, dtype: torch.dtype) -> None:
    """diffusers dequantizes these modules in F16 arithmetic; declared modules are float32."""
    file = file_of(WAN, kind)
    expected = file.library_load(quantization_config=quantization(dtype, "attn1"))
    found = file.load(quantization_config=quantization(dtype, "attn1"))
    assert found.blocks[0].attn1.to_q.weight.dtype == dtype
    assert found.blocks[0].attn2.to_q.weight.dtype == torch.uint8
    assert_same(found, expected)


def test_a_patched_load_writes_blocks_to_the_offload_folder(tmp_path: Path) -> None:
    file = File(tmp_path / "file", WAN, mixed)
    device_map = {"": "cpu", "blocks.0": "disk"}
    options = {"quantization_config": quantization(), "device_map": device_map}
    with loadstone.patch("diffusers"):
        found = file.library_load(**options, offload_folder=tmp_path / "off")
    assert found.blocks[0].ffn.net[0].proj.weight.is_meta and loadstone.audit(found).ok
    assert list((tmp_path / "off").iterdir())
    expected = file.load(quantization_config=quantization())
    assert torch.equal(output_of_wan(found), output_of_wan(expected))


@pytest.mark.parametrize("choose", [mixed, lambda _: Kind.BF16], ids=["mixed", "BF16"])
def test_outputs_of_a_packed_model(tmp_path: Path, choose: Any) -> None:
    """diffusers keeps BF16 as bytes, loadstone as BF16 tensors; the outputs are equal."""
    file = File(tmp_path, WAN, choose)
    made = [load(quantization_config=quantization()) for load in (file.load, file.library_load)]
    outputs = [output_of_wan(model) for model in made]
    assert torch.equal(*outputs)
    assert outputs[0].isfinite().all()


@torch.no_grad()
def output_of_wan(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    output: torch.Tensor = model(
        hidden_states=torch.randn(1, 16, 1, 4, 4, generator=generator).bfloat16(),
        timestep=torch.tensor([3]),
        encoder_hidden_states=torch.randn(1, 4, 256, generator=generator).bfloat16(),
    ).sample
    return output


@pytest.mark.parametrize("names", ["original", "diffusers"])
def test_the_library_runs_a_converted_bf16_file(tmp_path: Path, names: str) -> None:
    """diffusers keeps BF16 tensors as bytes, which its convolutions and tables cannot use."""
    model = WAN.build()
    state = WAN.original(model) if names == "original" else model.state_dict()
    state = {name: value.to(torch.bfloat16).contiguous() for name, value in state.items()}
    source, file = tmp_path / "wan.safetensors", tmp_path / "wan.gguf"
    save_file(state, source)
    model.save_config(tmp_path / "config")
    metadata = None if names == "original" else {"general.architecture": "wan"}
    loadstone.convert(source, file, quantize="q8_0", beyond_ggml=True, metadata=metadata)
    kinds = {str(each.name): each.tensor_type for each in gguf.GGUFReader(file).tensors}
    assert {kinds[name] for name in kinds if "patch_embedding" in name} == {Kind.F32}
    embedders = ("condition_embedder", "text_embedding", "time_embedding", "time_projection")
    plain = {kinds[name] for name in kinds if any(part in name for part in embedders)}
    assert plain == {Kind.F32, Kind.BF16}
    options = {"config": str(tmp_path / "config"), "quantization_config": quantization()}
    loads = (
        WAN.cls.from_single_file,
        functools.partial(loadstone.diffusers.from_single_file, WAN.cls),
    )
    theirs, ours = (load(str(file), torch_dtype=torch.bfloat16, **options) for load in loads)
    assert torch.equal(theirs.patch_embedding.weight, ours.patch_embedding.weight)
    assert torch.equal(ours.patch_embedding.weight, model.patch_embedding.weight.bfloat16())
    assert torch.equal(output_of_wan(theirs), output_of_wan(ours))


def test_differences_of_packed_models_are_found(tmp_path: Path) -> None:
    file = File(tmp_path, WAN, mixed)
    first, second = (file.load(quantization_config=quantization()) for _ in range(2))
    assert differences(first, second) == []
    weight = second.blocks[1].ffn.net[2].weight
    with torch.no_grad():
        weight.as_tensor()[0, 0] ^= 1
    assert differences(first, second) == ["blocks.1.ffn.net.2.weight: other values"]
    other = file.load(torch_dtype=torch.bfloat16)
    assert any(line.endswith("different block format") for line in differences(first, other))


# --- rejected files -------------------------------------------------------------------------------


def test_missing_tensor_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = by_name("wan_t2v")
    file = File(tmp_path, case, lambda _: Kind.Q8_0)
    for name in (
        "model.diffusion_model.blocks.0.ffn.0.weight",
        "model.diffusion_model.blocks.0.norm3.weight",
    ):
        del file.tensors.data[name]
    file.tensors.write(tmp_path / "less.gguf")
    file.path = str(tmp_path / "less.gguf")
    monkeypatch.setattr(gguf, "GGUFReader", refuse)
    for options in ({}, {"quantization_config": quantization()}):
        with pytest.raises(loadstone.PlanError) as raised:
            file.load(**options)
        errors = [item for item in raised.value.findings if item.severity == "error"]
        assert {item.target for item in errors} == {
            "blocks.0.ffn.net.0.proj.weight", "blocks.0.norm2.weight",
        }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [*SCALES, Kind.Q8_0], ids=lambda kind: kind.name)
def test_modules_that_are_not_to_be_packed_of_cut_blocks(
    file_of: Files, kind: Kind, dtype: torch.dtype
) -> None:
    """The converter cuts or swaps parts of a tensor that the load also dequantizes.

    diffusers, too, cuts before it decodes.
    """
    file = file_of(BLOCK_CASES[1], kind)
    options = {"quantization_config": quantization(dtype, "attn", "norm_out")}
    expected = file.library_load(**options)
    options = {"quantization_config": quantization(dtype, "attn", "norm_out")}
    found = file.load(**options)
    assert found.transformer_blocks[0].attn.to_k.weight.dtype == dtype
    assert found.norm_out.linear.weight.dtype == dtype
    assert found.transformer_blocks[0].attn2.to_k.weight.dtype == torch.uint8
    assert_same(found, expected)
