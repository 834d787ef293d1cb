"""Tests the classes of ``diffusers_further_rows`` with plain and GGUF files in original names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from diffusers_gguf import PLAIN, File, Kind, assert_same, quantization
from diffusers_models import (
    CASES,
    FURTHER_CASES,
    Case,
    by_name,
    cast_copy,
    differences,
    library_converted,
    refuse,
    state_of,
    write_single_file,
)

import loadstone
import loadstone.diffusers
from loadstone._execute.audit import last_report

pytest.importorskip("diffusers")

# Classes whose converter ignores tables of the file, which are persistent buffers of the model.
MOTION = ("motion_adapter", "sparse_controlnet")
TABLE = ".pos_embed.pe"
SAMPLE = ("flux2", "minimax_h3", "ltx2_vae")  # the sweep tests the other classes
# Classes without ``from_single_file``, for which diffusers has a converter.
WITHOUT_LOADER = ("ltx2_audio_vae",)


def sampled(left_out: tuple[str, ...] = ()) -> list[Any]:
    return [
        pytest.param(case, id=case.name, marks=() if case.name in SAMPLE else pytest.mark.sweep)
        for case in FURTHER_CASES
        if case.name not in left_out
    ]


def test_every_class_with_a_converter_has_a_case() -> None:
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    assert {case.class_name for case in [*CASES, *FURTHER_CASES]} == set(
        SINGLE_FILE_LOADABLE_CLASSES
    )


@pytest.mark.parametrize("case", sampled())
def test_the_librarys_converter_takes_the_layouts(case: Case) -> None:
    """diffusers' converter makes the model's names, shapes and values from our original layout."""
    model = case.build()
    state = state_of(model)
    converted = library_converted(case, case.original(model), model)
    tables = {name for name in state if name.endswith(TABLE)}
    assert set(state) - set(converted) == tables
    assert bool(tables) == (case.name in MOTION)
    for name in state.keys() - tables:
        assert torch.equal(converted[name], state[name]), name


@pytest.mark.parametrize("case", sampled((*MOTION, *WITHOUT_LOADER)))
def test_original_file(tmp_path: Path, no_readers: None, case: Case) -> None:
    model = case.build()
    file, config = write_single_file(case, model, tmp_path / "model.safetensors")
    for dtype in (None, torch.bfloat16):
        found = loadstone.diffusers.from_single_file(
            case.cls, file, config=config, torch_dtype=dtype
        )
        assert_same(found, model if dtype is None else cast_copy(case, model, dtype))


@pytest.mark.parametrize("case", sampled())
def test_folder_of_shards(tmp_path: Path, no_readers: None, case: Case) -> None:
    model = case.build(seed=2)
    model.save_pretrained(tmp_path / "model", max_shard_size="50KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    assert_same(loadstone.diffusers.from_pretrained(case.cls, str(tmp_path / "model")), model)


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.name)
@pytest.mark.parametrize("case", sampled((*MOTION, *WITHOUT_LOADER)))
def test_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case, kind: Kind) -> None:
    """Load dequantized, and packed as diffusers itself does."""
    file = File(tmp_path, case, lambda _: kind)
    reference = file.reference()
    expected = file.library_load(quantization_config=quantization())
    monkeypatch.setattr(gguf, "GGUFReader", refuse)
    assert_same(file.load(), reference)
    assert_same(file.load(torch_dtype=torch.float16), cast_copy(case, reference, torch.float16))
    assert_same(file.load(quantization_config=quantization()), expected)


@pytest.mark.sweep
@pytest.mark.parametrize("name", MOTION)
def test_tables_that_the_converter_leaves_in_the_file(
    tmp_path: Path, no_readers: None, name: str
) -> None:
    """The constructor fills these tables, as in diffusers, and the report lists them."""
    case = by_name(name)
    model = case.build()
    file, config = write_single_file(case, model, tmp_path / "model.safetensors")
    found = loadstone.diffusers.from_single_file(
        case.cls, file, config=config, missing={r".*\.pos_embed\.pe": "initialise"}
    )
    assert all(line.endswith(f"{TABLE}: other values") for line in differences(found, model))
    plain = case.construct().state_dict()
    tables = {target for target in plain if target.endswith(TABLE)}
    told = {item.target for item in last_report(found).findings if item.severity == "warning"}
    assert told == tables
    for target in tables:
        assert loadstone.audit(found).provenance[target].origin == "constructor"
        assert torch.equal(found.state_dict()[target], plain[target])


@pytest.mark.parametrize("name", MOTION)
def test_a_patched_library_leaves_tables_to_the_constructor(
    tmp_path: Path, no_readers: None, name: str
) -> None:
    """A patched load succeeds as in diffusers, and warns of the tables."""
    case = by_name(name)
    model = case.build()
    file, config = write_single_file(case, model, tmp_path / "model.safetensors")
    with pytest.raises(loadstone.PlanError) as caught:
        loadstone.diffusers.from_single_file(case.cls, file, config=config)
    assert caught.value.code == "plan.missing"  # by default a direct call fills no missing tensor
    with loadstone.patch("diffusers"), pytest.warns(UserWarning, match=TABLE):
        found = case.cls.from_single_file(file, config=config)
    plain = case.construct().state_dict()
    for target, tensor in found.state_dict().items():
        assert torch.equal(
            tensor, plain[target] if target.endswith(TABLE) else model.state_dict()[target]
        )
