"""Tests each rule of transformers' loader, on transformers and on loadstone.

Each case is a small model of shapes, a file, and conversions registered for the model. Both
libraries must load the same model in the same state, or both must fail. Each intended difference
has its own test, and docs/transformers.md gives the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import pairs
from safetensors.torch import save_file

import loadstone

pytest.importorskip("transformers")

from transformers import conversion_mapping
from transformers import core_model_loading as library
from transformers_nets import (
    CASES,
    FUSED,
    A,
    B,
    Case,
    Converter,
    Net,
    NetConfig,
    both,
    experts,
    fuse,
    judge,
    rand,
)  # fmt: skip


@pytest.fixture(autouse=True)
def registry_as_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    conversion_mapping.get_checkpoint_conversion_mapping("legacy")  # fills transformers' cache
    kept = dict(conversion_mapping._checkpoint_conversion_mapping_cache)
    users = set(conversion_mapping.USER_REGISTERED_MAPPINGS)
    yield
    cache = conversion_mapping._checkpoint_conversion_mapping_cache
    cache.clear()
    cache.update(kept)
    conversion_mapping.USER_REGISTERED_MAPPINGS.clear()
    conversion_mapping.USER_REGISTERED_MAPPINGS.update(users)


@pytest.mark.parametrize("name", CASES)
def test_as_the_library(name: str, tmp_path: Path):
    judge(CASES[name], tmp_path)


def derived(**attributes: Any) -> Any:
    """Return a new subclass of Net with these attributes."""
    return type("Net", (Net,), attributes)


KEPT = {"a.w": A, "kept.w": B, "b.kept": rand(4), "n": rand(3)}
KEPT_SHAPES = {"a.w": [4, 4], "kept.w": [4, 4], "b.kept": [4], "n#": [3]}


@pytest.mark.parametrize(
    ("strict", "dtype", "stored"),
    pairs(
        [False, True],
        [torch.float16, torch.bfloat16, torch.float32, "auto"],
        [torch.float32, torch.float16, torch.bfloat16],
    ),
)
def test_modules_kept_in_float32(strict: bool, dtype: Any, stored: torch.dtype, tmp_path: Path):
    attribute = "_keep_in_fp32_modules" + ("_strict" if strict else "")
    cls = derived(**{attribute: ["kept"]})
    state = {name: value.to(stored) for name, value in KEPT.items()}
    verdict = judge(Case(KEPT_SHAPES, state, cls=cls, options={"dtype": dtype}), tmp_path)
    if dtype == torch.float16:  # control: _keep_in_fp32_modules has an effect
        assert verdict.loaded is not None
        assert verdict.loaded.model.kept.w.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, "auto"])
@pytest.mark.parametrize("stored", [torch.int64, torch.bool, torch.int32, torch.uint8])
def test_integers_of_a_module_kept_in_float32(stored: torch.dtype, dtype: Any, tmp_path: Path):
    """transformers casts such integers too; loadstone rejects narrow ones, which may be codes."""
    cls = derived(_keep_in_fp32_modules=["kept"], dtypes={"kept.n#": stored})
    value = torch.tensor([0, 1, 2**24 + 1]).to(stored)
    state = {"a.w": A.half(), "kept.w": B.half(), "kept.n": value}
    shapes = {"a.w": [4, 4], "kept.w": [4, 4], "kept.n#": [3]}
    case = Case(shapes, state, cls=cls, options={"dtype": dtype})
    if stored in (torch.int64, torch.bool) or dtype in (torch.float32, torch.bfloat16):
        verdict = judge(case, tmp_path)
        assert verdict.loaded is not None
        return
    ours, theirs = both(case, tmp_path)
    assert theirs.loaded is not None
    assert isinstance(ours.error, loadstone.PlanError) and "no cast" in str(ours.error)


def test_a_converted_module_is_kept_in_float32(tmp_path: Path):
    cls = derived(_keep_in_fp32_modules_strict=["q"])
    conversions: Any = lambda: [Converter("qk", ["q", "k"], [library.Chunk(dim=0)])]  # noqa: E731
    case = Case(
        {"q": [2, 4], "k": [2, 4]},
        {"qk": A.bfloat16()},
        conversions,
        {"dtype": torch.bfloat16},
        cls,
    )
    judge(case, tmp_path)


INTEGERS = {"i": torch.int64, "f": torch.float64, "h": torch.int32, "t": torch.bool,
            "u": torch.uint8}  # fmt: skip


def integer_state() -> dict[str, torch.Tensor]:
    return {
        "i": torch.tensor([1, 2**40, -3]),
        "f": rand(3).double(),
        "h": torch.tensor([1, -(2**30), 7], dtype=torch.int32),
        "t": torch.tensor([True, False, True]),
        "u": torch.tensor([1, 254, 7], dtype=torch.uint8),
        "w": rand(3),
    }


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, "auto"])
@pytest.mark.parametrize("kind", ["", "#"])
def test_numbers_that_are_no_floats(kind: str, dtype: Any, tmp_path: Path):
    shapes = {name + kind: [3] for name in INTEGERS} | {"w": [3]}
    cls = derived(dtypes={name + kind: dtype for name, dtype in INTEGERS.items()})
    judge(Case(shapes, integer_state(), cls=cls, options={"dtype": dtype}), tmp_path)


CASTS = [
    (torch.int32, torch.int64), (torch.int64, torch.int32), (torch.uint8, torch.int64),
    (torch.float64, torch.float16), (torch.float16, torch.float64),
]  # fmt: skip
BETWEEN_KINDS = [
    (torch.float32, torch.int64), (torch.int64, torch.float32), (torch.bool, torch.float32),
    (torch.float32, torch.bool), (torch.uint8, torch.bfloat16), (torch.float64, torch.int32),
]  # fmt: skip


def with_a_buffer(stored: torch.dtype, wanted: torch.dtype) -> Case:
    cls = derived(dtypes={"n#": wanted})
    value = torch.tensor([0, 1, 2, 100]).to(stored)
    return Case({"n#": [4], "w": [3]}, {"n": value, "w": rand(3)}, cls=cls)


@pytest.mark.parametrize(("stored", "wanted"), CASTS)
def test_numbers_in_another_width(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path):
    judge(with_a_buffer(stored, wanted), tmp_path)


@pytest.mark.parametrize(
    "attributes",
    [
        {"_keys_to_ignore_on_load_missing": [r"^b\."]},
        {"_keys_to_ignore_on_load_unexpected": [r"z\.w"]},
        {"_keys_to_ignore_on_load_unexpected": [r"^z", r"y\.\d"]},
        {"_keys_to_ignore_on_load_missing": ["b"], "_keys_to_ignore_on_load_unexpected": ["z"]},
    ],
)
def test_names_that_nobody_wants_to_hear_of(attributes: dict[str, Any], tmp_path: Path):
    state = {"a.w": A, "z.w": B, "y.1.w": B}
    shapes = {"a.w": [4, 4], "b.w": [4, 4]}
    silent = frozenset({"b.w"})  # has no effect if transformers reports the name as missing
    verdict = judge(Case(shapes, state, cls=derived(**attributes), silent=silent), tmp_path)
    assert verdict.loaded is not None
    named = verdict.loaded.info["missing_keys"] | verdict.loaded.info["unexpected_keys"]
    assert len(named) < 3  # control: without the attributes, all three names are reported


# --- differences, each with its reason in docs/transformers.md -----------------------------------


def test_an_expert_that_is_missing_fails_before_anything_is_read(tmp_path: Path):
    state = experts()
    del state["layers.0.experts.7.w3.weight"]
    ours, theirs = both(Case(FUSED, state, fuse), tmp_path)
    assert theirs.error is not None and "7" not in str(theirs.error)
    assert "layers.0.experts.7.w3.weight" in str(ours.error)


def test_a_lost_expert_is_an_error_also_when_mismatches_are_ignored(tmp_path: Path):
    state = {name: value for name, value in experts().items() if ".11." not in name}
    ours, theirs = both(Case(FUSED, state, fuse, {"ignore_mismatched_sizes": True}), tmp_path)
    assert theirs.loaded is not None and theirs.loaded.random == FUSED.keys()
    assert isinstance(ours.error, loadstone.PlanError)
    assert "layers.0.experts.11.w2.weight" in str(ours.error)


def test_a_lost_vector_of_a_stack_is_named_alone(tmp_path: Path):
    state = {f"experts.{expert}.bias": rand(4, seed=expert) for expert in (0, 1, 3)}
    stack: Any = lambda: [  # noqa: E731
        Converter("experts.*.bias", "biases", [library.MergeModulelist(dim=0)])
    ]
    ours, theirs = both(Case({"biases": [4, 4]}, state, stack), tmp_path)
    assert theirs.error is not None or theirs.loaded is not None
    assert isinstance(ours.error, loadstone.PlanError)
    (finding,) = [each for each in ours.error.findings if each.severity == "error"]
    assert finding.sources == ["experts.2.bias"] and "experts.3" not in finding.message


def test_a_kind_of_expert_that_is_missing_fails_before_anything_is_read(tmp_path: Path):
    state = {name: value for name, value in experts().items() if ".w3." not in name}
    ours, theirs = both(Case(FUSED, state, fuse), tmp_path)
    assert isinstance(theirs.error, RuntimeError)
    assert isinstance(ours.error, loadstone.PlanError)
    assert "layers.0.experts.gate_up" in str(ours.error)


@pytest.mark.parametrize(("stored", "wanted"), BETWEEN_KINDS)
def test_casts_between_kinds_of_numbers_are_refused(
    stored: torch.dtype, wanted: torch.dtype, tmp_path: Path
):
    ours, theirs = both(with_a_buffer(stored, wanted), tmp_path)
    assert theirs.loaded is not None
    assert isinstance(ours.error, loadstone.PlanError)
    assert "'n'" in str(ours.error) and "no cast" in str(ours.error)


def test_a_part_that_the_model_lacks_is_unexpected(tmp_path: Path):
    """The model lacks the second of three parts; a bug makes transformers fail on this."""
    case = Case(
        {"q.w": [2, 4], "v.w": [2, 4]},
        {"qkv.w": rand(6, 4)},
        lambda: [Converter("qkv.w", ["q.w", "k.w", "v.w"], [library.Chunk(dim=0)])],
    )
    ours, theirs = both(case, tmp_path)
    assert isinstance(theirs.error, AttributeError)
    assert ours.loaded is not None
    assert ours.loaded.info["unexpected_keys"] == {"k.w"}
    assert torch.equal(ours.loaded.model.v.w, rand(6, 4)[4:])


def test_what_is_left_unwritten_by_the_library_has_the_constructors_value(tmp_path: Path):
    """Tensors that no initialiser sets keep the constructor's value, which is 2 here."""
    cls = derived(dtypes={"n#": torch.int64, "m": torch.int64})
    shapes = {"n#": [3], "x#": [3], "m": [3], "w": [4]}
    ours, theirs = both(Case(shapes, {"w": rand(4)}, cls=cls), tmp_path)
    assert theirs.loaded is not None and ours.loaded is not None
    assert theirs.loaded.uninitialised == {"n", "x", "m"}
    for name in ("n", "x", "m"):
        assert getattr(ours.loaded.model, name).tolist() == [2, 2, 2], name


# --- load(rules="transformers", dtype=) ----------------------------------------------------------


MIXED = {"a.w": A, "kept.w": B, "b.w": rand(4), "i": torch.tensor([1, 2**40, -3]), "n": rand(3)}
MIXED_SHAPES = {"a.w": [4, 4], "kept.w": [4, 4], "b.w": [4], "i": [3], "n#": [3]}
HALVES = (torch.float16, torch.bfloat16)


def built(body: torch.dtype, head: torch.dtype, on_meta: bool, **attributes: Any) -> Any:
    """Build a model whose body and head have different dtypes."""
    cls = derived(dtypes={"i": torch.int64}, **attributes)
    with loadstone.skeleton() if on_meta else contextlib.nullcontext():
        model = cls(NetConfig(shapes=MIXED_SHAPES))
    model.a.to(body), model.kept.to(body), model.b.to(head)
    return model


def by_load(model: Any, folder: Path, dtype: Any) -> None:
    loadstone.load(model, folder, rules="transformers", dtype=dtype)


def by_a_saved_plan(model: Any, folder: Path, dtype: Any) -> None:
    loadstone.plan(model, folder, rules="transformers", dtype=dtype).save(folder / "plan.json")
    loadstone.Plan.load(folder / "plan.json").execute(model=model)


def by_accelerate(model: Any, folder: Path, dtype: Any) -> None:
    pytest.importorskip("accelerate")
    loadstone.accelerate.load_checkpoint_and_dispatch(model, folder, dtype=dtype)


@pytest.mark.parametrize(
    ("on_meta", "body", "head", "dtype", "way"),
    pairs(
        [False, True],
        [torch.float32, torch.bfloat16],
        [torch.float32, torch.float64, *HALVES],
        [torch.float32, *HALVES, "bfloat16"],
        [by_load, by_a_saved_plan, by_accelerate],
    ),
)
def test_the_callers_dtype_holds_whatever_a_model_was_built_in(
    on_meta: bool, body: torch.dtype, head: torch.dtype, dtype: Any, way: Any, tmp_path: Path
):
    save_file(MIXED, tmp_path / "model.safetensors", {"format": "pt"})
    keeps = {"_keep_in_fp32_modules": ["kept"]}
    model = built(body, head, on_meta, **keeps)
    model.config.save_pretrained(tmp_path)
    way(model, tmp_path, dtype)
    theirs = type(model).from_pretrained(tmp_path, dtype=dtype).state_dict()
    for name, value in model.state_dict().items():
        assert value.dtype == theirs[name].dtype and torch.equal(value, theirs[name]), name
    is_kept = dtype == torch.float16  # control: _keep_in_fp32_modules has an effect
    assert model.kept.w.dtype == (torch.float32 if is_kept else model.a.w.dtype)
    assert model.i.dtype == torch.int64


@pytest.mark.parametrize("dtype", [None, "auto"])
def test_control_with_no_dtype_asked_for_each_parameter_keeps_its_own(dtype: Any, tmp_path: Path):
    save_file(MIXED, tmp_path / "model.safetensors", {"format": "pt"})
    model = built(torch.bfloat16, torch.float32, False)
    loadstone.load(model, tmp_path, rules="transformers", dtype=dtype)
    assert (model.a.w.dtype, model.b.w.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(model.a.w, A.bfloat16()) and torch.equal(model.b.w, MIXED["b.w"])
