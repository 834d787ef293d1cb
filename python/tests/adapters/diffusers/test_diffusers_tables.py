"""Tests that buffers and plain tensors that no file contains have the constructor's values."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers_models import (
    CONSTRUCTED,
    TABLE_CASES,
    WEIGHT_NORM_CASES,
    Case,
    assert_same,
    by_name,
    cast_copy,
    differences,
    with_meta,
)
from torch.nn.utils.weight_norm import WeightNorm

import loadstone
import loadstone.diffusers
from loadstone._model.walk import walk

diffusers = pytest.importorskip("diffusers")

# All classes with such tensors and from_single_file; test_no_class_is_left_out checks this.
OF_FILES = (
    "wan_t2v", "wan_vace", "wan_animate", "skyreels_v2", "chrono_edit", "qwen_image",
    "qwen_image21", "minimax_h3", "dit", "pixart", "cogvideox", "kandinsky5",
)  # fmt: skip
ALL = [*map(by_name, OF_FILES), *TABLE_CASES]
SAMPLE = ("wan_animate", "qwen_image", "lumina2_narrow", "dit", "kandinsky5", "oobleck")
# Names of tables that the acceptance cases list.
NAMED = {
    "qwen_image": {"pos_embed.pos_freqs", "pos_embed.neg_freqs"},
    "lumina2_narrow": {f"rope_embedder.freqs_cis[{index}]" for index in range(3)},
    "dit": {"pos_embed.pos_embed"},
    "pixart": {"pos_embed.pos_embed"},
    "cogvideox": {"patch_embed.pos_embedding"},
    "kandinsky5": {"time_embeddings.freqs", "text_rope_embeddings.args"},
    "wan_t2v": {"rope.freqs_cos", "rope.freqs_sin"},
}
# Tables that are built in torch's default dtype, which diffusers sets to ``torch_dtype``.
IN_DEFAULT_DTYPE = {
    "consistency_decoder": ("means", "stds"),
    "prior": ("causal_attention_mask",),
    "wan_animate": (".blur_kernel",),
}
# The class that keeps the two factors of each product weight in float32.
KEEPS_FACTORS = "minimax_h3_audio"
# Tables that are built when diffusers is imported, so no skeleton has them on meta.
REAL_ANYWAY = {"cosmos_vae": (".wavelets",)}


def sampled(cases: list[Case]) -> list[Any]:
    return [
        pytest.param(case, id=case.name, marks=() if case.name in SAMPLE else pytest.mark.sweep)
        for case in cases
    ]


def tables(model: Any) -> dict[str, torch.Tensor]:
    return {slot.name: slot.tensor for slot in walk(model) if slot.kind in CONSTRUCTED}


def renew_products(model: Any) -> set[str]:
    """Compute the weights that a hook would compute before a forward pass; return their names."""
    made = set()
    for path, module in model.named_modules():
        for hook in list(module._forward_pre_hooks.values()):
            if isinstance(hook, WeightNorm):
                setattr(module, hook.name, hook.compute_weight(module).detach())
                made.add(f"{path}.{hook.name}")
    return made


def folder_of(model: Any, folder: Path) -> str:
    model.save_pretrained(folder / "model")
    return str(folder / "model")


# --- as constructed ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", sampled([*ALL, *WEIGHT_NORM_CASES]))
@pytest.mark.parametrize("includes_buffers", ["0", "1"])
def test_tables_are_the_constructors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case, includes_buffers: str
) -> None:
    """The values do not depend on accelerate's setting that leaves buffers on meta."""
    model = case.build()
    products = renew_products(model)
    names = tables(model).keys()
    assert names > products or (products and case in WEIGHT_NORM_CASES)
    assert NAMED.get(case.name, set()) <= names
    folder = folder_of(model, tmp_path)
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", includes_buffers)
    for dtype in (None, torch.bfloat16, torch.float16):
        found = loadstone.diffusers.from_pretrained(case.cls, folder, torch_dtype=dtype)
        expected = model if dtype is None else cast_copy(case, model, dtype)
        made = tables(case.construct(dtype))
        for slot in walk(expected):
            if slot.name.endswith(IN_DEFAULT_DTYPE.get(case.name, ())):
                assert made[slot.name].dtype == (dtype or torch.float32)
                slot.replace(made[slot.name])
        assert renew_products(expected) == products
        assert not any(tensor.is_meta for tensor in tables(found).values())
        assert loadstone.audit(found).ok
        if case.name == KEEPS_FACTORS and dtype is not None:
            # Products have the default dtype until a forward pass computes them.
            renew_products(found)
        lines = differences(found, expected)
        assert not lines, "\n".join(lines[:20])


@pytest.mark.sweep
def test_no_class_is_left_out() -> None:
    """Every model class can be built without memory, and each class with tables has a test."""
    from diffusers.models.modeling_utils import no_init_weights

    tested = {case.class_name for case in [*ALL, *WEIGHT_NORM_CASES]}
    found = set()
    built = 0
    for name in sorted(dir(diffusers)):
        cls = getattr(diffusers, name)
        if not inspect.isclass(cls) or not issubclass(cls, diffusers.ModelMixin):
            continue
        try:
            with no_init_weights(), torch.device("meta"):
                model = cls()
        except (TypeError, ValueError, AssertionError):  # the class has arguments without defaults
            continue
        built += 1
        if tables(model):
            found.add(name)
    assert built > 130
    assert len(found) > 34
    assert found - tested == set()


@pytest.mark.parametrize("case", sampled(WEIGHT_NORM_CASES))
def test_the_library_leaves_products_on_meta(tmp_path: Path, case: Case) -> None:
    """diffusers computes the products in the first forward pass, loadstone during the load."""
    model = case.build()
    library = case.cls.from_pretrained(folder_of(model, tmp_path))
    products = renew_products(model)
    on_meta = {name for name, tensor in tables(library).items() if tensor.is_meta}
    assert products
    assert on_meta == products


# --- uninitialised memory -------------------------------------------------------------------------


@pytest.mark.parametrize("recovers", [True, False], ids=["loadstone", "control"])
@pytest.mark.parametrize("case", sampled([*ALL, by_name("same")]))
def test_memory_that_nobody_wrote_never_gets_into_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case, recovers: bool
) -> None:
    """Before the load, fill tables that a skeleton left on meta with poisoned memory.

    loadstone's skeleton has no such tables. With diffusers' skeleton, which is the control, every
    table is wrong.
    """
    from loadstone._adapters.diffusers import hooks, load

    model = case.build()
    products = renew_products(model)
    folder = folder_of(model, tmp_path)
    if not recovers:
        monkeypatch.setattr(hooks, "locked_skeleton", with_meta)
    original = load.DiffusersSession.read
    poisoned: set[str] = set()

    def read(self: Any, request: Any) -> Any:
        for slot in walk(request.model):
            is_empty = slot.kind in CONSTRUCTED and slot.tensor.is_meta
            if is_empty and not (recovers and slot.name in products):  # the load computes products
                memory = torch.full((slot.tensor.nbytes,), 0x5A, dtype=torch.uint8)
                slot.replace(memory.view(slot.tensor.dtype).reshape(slot.tensor.shape))
                poisoned.add(slot.name)
        return original(self, request)

    monkeypatch.setattr(load.DiffusersSession, "read", read)
    found = loadstone.diffusers.from_pretrained(case.cls, folder)
    lines = differences(found, model)
    if recovers:
        assert not poisoned
        assert_same(found, model)
    else:
        real = REAL_ANYWAY.get(case.name, ())
        assert poisoned == {name for name in tables(model) if not name.endswith(real)}
        assert {line.split(":")[0] for line in lines} == poisoned
        assert all(line.endswith("other values") for line in lines)
