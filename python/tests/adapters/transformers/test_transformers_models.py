"""Tests that many model types are loaded bit-equal to transformers' own ``from_pretrained``.

``make test`` runs a sample with each kind of conversion; the sweep (``make test-all``) runs all.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from compare import assert_same_state, filled_memory, library_load, uninitialised_names
from pairs import pairs
from transformers_models import (
    CASES,
    ModelCase,
    by_name,
    own_state,
    write_checkpoint,
    write_state,
)  # fmt: skip

import loadstone
from loadstone._model.walk import walk

pytest.importorskip("transformers")

# Types that together need every kind of conversion in transformers; a test below checks this.
SAMPLE = (
    "mixtral", "qwen3_vl_moe", "hrm_text", "molmo2_text", "ernie4_5_vl_moe", "kimi_k25",
    "mistral_large4", "inkling_mm_model", "inkling2_text", "clip_text", "t5", "chinese_clip",
    "wav2vec2",
)  # fmt: skip
LAYOUTS = ("public", "older", "own")
SIZE_MAX = 40_000_000  # the largest number of parameters of a model in the sweep
# Types with modules that stay in float32, with fused experts, with chunks, or with permutations.
CAST = ("t5", "mixtral", "kimi_k25", "hrm_text")
CAST_IN_SWEEPS = ("blip-2", "mamba2", "jamba")
SHARDED = ("mixtral", "molmo2_text", "t5", "qwen3_moe", "kimi_k25")


def marked(rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return parameters for pytest; rows whose case is not in SAMPLE belong to the sweep."""
    return [
        pytest.param(
            *row,
            id="-".join(str(item).removeprefix("torch.") for item in row),
            marks=() if row[0].name in SAMPLE else pytest.mark.sweep,
        )
        for row in rows
    ]


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("a library's own reader or converter ran")


def ours_load(cls: Any, folder: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Load with uninitialised memory made visible, and fail if transformers' loader runs."""
    from transformers import core_model_loading, modeling_utils

    with filled_memory(), pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (modeling_utils, "convert_and_load_state_dict_in_model"),
            (modeling_utils, "load_state_dict"),
            (core_model_loading, "spawn_materialize"),
            (safetensors.torch, "load_file"),
            (torch, "load"),
            (torch.nn.Module, "load_state_dict"),
        ):
            patch.setattr(owner, name, refuse)
        model, info = loadstone.transformers.from_pretrained(
            cls, folder, output_loading_info=True, **options
        )
    return model, info


def check(case: ModelCase, folder: Path, **options: Any) -> None:
    library = library_load(case.cls, folder, **options)
    model, info = ours_load(case.cls, folder, **options)
    assert uninitialised_names(model) == set()
    assert_same_state(
        model, library.model, info, library.info, library.random, library.uninitialised
    )
    audit = loadstone.audit(model)
    assert audit.ok, str(audit)
    for name in library.uninitialised:
        assert name in audit.provenance, name


@pytest.mark.parametrize(
    ("case", "layout"), marked((case, layout) for case in CASES for layout in LAYOUTS)
)
def test_equal_to_the_library(case: ModelCase, layout: str, tmp_path: Path):
    check(case, write_checkpoint(case, tmp_path, layout), dtype="auto")


@pytest.mark.parametrize(
    ("case", "layout", "dtype"),
    marked(
        (by_name(name), layout, dtype)
        for names in (CAST, CAST_IN_SWEEPS)
        for name, layout, dtype in pairs(names, LAYOUTS, (torch.float32, torch.float16))
    ),
)
def test_equal_in_another_dtype(case: ModelCase, layout: str, dtype: torch.dtype, tmp_path: Path):
    check(case, write_checkpoint(case, tmp_path, layout), dtype=dtype)


@pytest.mark.parametrize(
    ("case", "layout"), marked((by_name(name), layout) for name in SHARDED for layout in LAYOUTS)
)
def test_equal_from_shards(case: ModelCase, layout: str, tmp_path: Path):
    write_checkpoint(case, tmp_path, layout, max_shard_size=40_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check(case, tmp_path, dtype="auto")
    check(case, tmp_path, dtype="auto")  # the second time with recipes from the cache


@pytest.mark.parametrize("case", marked((by_name(name),) for name in ("mixtral", "t5")))
def test_equal_from_float32_to_bfloat16(case: ModelCase, tmp_path: Path):
    write_checkpoint(case, tmp_path, "public", torch.float32)
    check(case, tmp_path, dtype=torch.bfloat16)
    check(case, tmp_path)


# Device maps: for the whole model, as transformers places it, and with parts left on disk.
MAPS = {
    "cpu": "cpu",
    "auto": "auto",
    "root": {"": "cpu"},
    "layers": {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "cpu",
               "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"},
    "disk": {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
             "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "layout", "where"),
    marked(
        (by_name(name), layout, where)
        for name in ("mixtral", "qwen2", "glm4_moe")
        for layout in LAYOUTS
        for where in MAPS
    ),
)
def test_equal_with_a_device_map(case: ModelCase, layout: str, where: str, tmp_path: Path):
    folder = write_checkpoint(case, tmp_path / "model", layout)
    options = {"dtype": "auto", "device_map": MAPS[where], "offload_folder": tmp_path / "off"}
    check(case, folder, **options)


@pytest.mark.parametrize("case", marked((case,) for case in CASES))
def test_equal_where_the_file_lacks_tensors(case: ModelCase, tmp_path: Path):
    """The file lacks every fifth tensor, and has one that the model does not use."""
    write_checkpoint(case, tmp_path, "own")
    state = own_state(case.build(dtype=torch.bfloat16))
    lacking = {name: tensor for at, (name, tensor) in enumerate(state.items()) if at % 5 != 2}
    write_state({**lacking, "nobody.needs.this": torch.ones(2)}, tmp_path)
    check(case, tmp_path, dtype="auto")


def other_types() -> list[ModelCase]:
    """Return transformers' model types that have no case here, from its tables of classes."""
    from transformers.models.auto import modeling_auto

    classes: dict[str, str] = {}
    for table in ("MODEL_MAPPING_NAMES", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"):
        for name, class_names in getattr(modeling_auto, table).items():
            is_one = isinstance(class_names, str)
            classes[name] = class_names if is_one else class_names[0]
    tested = {case.name for case in CASES} | {case.class_name for case in CASES}
    return [
        ModelCase(name, class_name, {})
        for name, class_name in sorted(classes.items())
        if name not in tested and class_name not in tested
    ]


@pytest.mark.sweep
@pytest.mark.parametrize("case", other_types(), ids=str)
def test_equal_for_every_other_type_that_is_small(case: ModelCase, tmp_path: Path):
    """Skip types that cannot be built with the small values, or that remain large."""
    try:
        with torch.device("meta"):
            model = case.cls(case.config())
    except Exception as reason:
        pytest.skip(f"{type(reason).__name__}: {reason}"[:200])
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > SIZE_MAX:
        pytest.skip(f"{size} parameters")
    try:
        folder = write_checkpoint(case, tmp_path, "public")
        library = library_load(case.cls, folder, dtype="auto")
    except Exception as reason:
        pytest.skip(f"the library cannot: {type(reason).__name__}: {reason}"[:200])
    on_meta = {slot.name for slot in walk(library.model) if slot.tensor.is_meta}
    if on_meta:  # modules in a plain list, which state dicts omit
        with pytest.raises(loadstone.AuditError) as refused:
            ours_load(case.cls, folder, dtype="auto")
        assert refused.value.tensor in on_meta
        return
    check(case, folder, dtype="auto")


def test_a_wrong_value_is_seen(tmp_path: Path):
    """Control: the comparison detects one changed bit of one expert."""
    from safetensors.torch import load_file, save_file

    case = by_name("mixtral")
    write_checkpoint(case, tmp_path / "first", "public")
    write_checkpoint(case, tmp_path / "second", "public")
    file = tmp_path / "second" / "model.safetensors"
    state = load_file(file)
    name = next(name for name in state if ".experts.3.w1" in name or ".experts.3.gate" in name)
    state[name].view(torch.int16)[1, 2] ^= 1
    save_file(state, file, metadata={"format": "pt"})
    library = library_load(case.cls, tmp_path / "first")
    model, info = ours_load(case.cls, tmp_path / "second")
    with pytest.raises(AssertionError, match=r"1 of \d+ values differ"):
        assert_same_state(model, library.model, info, library.info)


def kinds(conversions: Iterable[Any]) -> set[str]:
    """Return the chains of operations, or for pure renames, their classes."""
    return {
        " > ".join(type(operation).__name__ for operation in item.operations)
        if hasattr(item, "operations")
        else type(item).__name__
        for item in conversions
    }


def test_the_sample_has_every_kind_of_conversion():
    from transformers import conversion_mapping

    registry = conversion_mapping._build_checkpoint_conversion_mapping()
    registered = set().union(*map(kinds, registry.values()))
    covered = set()
    for name in SAMPLE:
        case = by_name(name)
        with torch.device("meta"):
            model = case.cls(case.config())
        covered |= kinds(conversion_mapping.get_model_conversion_mapping(model))
    assert registered - covered == set()
    assert len(registered) > 10


def test_every_case_has_a_name_of_its_own():
    names = [case.name for case in CASES]
    assert len(names) == len(set(names)) >= 60
    assert {item for item in SAMPLE if item not in names} == set()
