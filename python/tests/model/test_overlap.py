"""Tests loads into tensors that share memory: parts of a flat buffer, and overlapping tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import loadstone
from loadstone._model.walk import walk
from loadstone._plan.overlap import _are_apart, _region, overlapping

BASE = 24


class Over(nn.Module):
    """A module whose parameters are views or copies of parts of one tensor."""

    def __init__(self, *cuts: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        base = torch.zeros(BASE)
        for number, cut in enumerate(cuts):
            self.register_parameter(f"p{number}", nn.Parameter(cut(base)))


OVERLAPPING = {
    "other shapes": (lambda b: b.view(4, 6), lambda b: b.view(6, 4)),
    "the same": (lambda b: b, lambda b: b),
    "a part": (lambda b: b.view(6, 4), lambda b: b.view(6, 4)[:2]),
    "an end": (lambda b: b[:13], lambda b: b[12:]),
    "other widths": (lambda b: b[:13], lambda b: b[12:].view(torch.float16)),
    "transposed": (lambda b: b.view(4, 6), lambda b: b.view(4, 6).t()),
    "a column": (lambda b: b.view(4, 6), lambda b: b.view(4, 6)[:, 2]),
    "wide columns": (lambda b: b.view(4, 6)[:, :4], lambda b: b.view(4, 6)[:, 3:]),
}
APART = {
    "flat": (lambda b: b[:6].view(2, 3), lambda b: b[6:12], lambda b: b[12:]),
    "columns": (lambda b: b.view(4, 6)[:, :3], lambda b: b.view(4, 6)[:, 3:]),
    "every second": (lambda b: b[0::2], lambda b: b[1::2]),
    "every second row": (lambda b: b.view(4, 6)[0::2], lambda b: b.view(4, 6)[1::2]),
    "columns, transposed": (lambda b: b.view(4, 6)[:, :3].t(), lambda b: b.view(4, 6)[:, 3:].t()),
}


def stored(model: nn.Module, path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Save different random values for each tensor."""
    state = {
        name: torch.randn(each.shape).to(each.dtype) for name, each in model.named_parameters()
    }
    save_file(state, path / "m.safetensors")
    return path / "m.safetensors", state


@pytest.mark.parametrize("case", OVERLAPPING)
def test_memory_of_two_parameters_is_refused_before_a_byte_is_read(case, tmp_path):
    model = Over(*OVERLAPPING[case])
    file, _ = stored(model, tmp_path)
    with pytest.raises(loadstone.PlanError, match=r"'p0' and 'p1' share memory") as caught:
        loadstone.load(model, file)
    assert caught.value.code == "plan.in_place"
    assert not any(each.any() for each in model.parameters())


@pytest.mark.parametrize("case", OVERLAPPING)
def test_a_skeleton_gets_both_values_and_says_that_memory_was_shared(case, tmp_path):
    with loadstone.skeleton():
        model = Over(*OVERLAPPING[case])
    file, state = stored(model, tmp_path)
    report = loadstone.load(model, file)
    found = [each for each in report.findings if each.code == "plan.tie"]
    assert [each.severity for each in found] == ["warning"] and "'p0' and 'p1'" in found[0].message
    assert all(torch.equal(each, state[name]) for name, each in model.named_parameters())


def test_a_plan_for_another_model_is_refused_where_memory_overlaps(tmp_path):
    with loadstone.skeleton():
        skeleton = Over(*OVERLAPPING["a part"])
    file, _ = stored(skeleton, tmp_path)
    model = Over(*OVERLAPPING["a part"])
    with pytest.raises(loadstone.PlanError, match="'p0' and 'p1' share memory"):
        loadstone.plan(skeleton, file).execute(model=model)
    assert not any(each.any() for each in model.parameters())


@pytest.mark.parametrize("case", APART)
@pytest.mark.parametrize("is_skeleton", [True, False])
def test_parts_of_one_memory_that_have_nothing_in_common_are_loaded(case, is_skeleton, tmp_path):
    if is_skeleton:
        with loadstone.skeleton():
            model = Over(*APART[case])
    else:
        model = Over(*APART[case])
    file, state = stored(model, tmp_path)
    report = loadstone.load(model, file)
    assert {each.code for each in report.findings} <= {"plan.in_place"}
    assert all(each.severity == "info" for each in report.findings)
    assert all(torch.equal(each, state[name]) for name, each in model.named_parameters())


def test_a_saved_buffer_over_a_parameters_memory_is_refused(tmp_path):
    model = nn.Module()
    model.qkv = nn.Parameter(torch.zeros(6, 4))
    model.register_buffer("q", model.qkv.detach()[:2])
    save_file({"qkv": torch.ones(6, 4), "q": torch.ones(2, 4)}, tmp_path / "m.safetensors")
    with pytest.raises(loadstone.PlanError, match="'qkv' and 'q' share memory"):
        loadstone.load(model, tmp_path / "m.safetensors")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_view_that_is_not_saved_follows_or_is_told(dtype, tmp_path):
    model = nn.Linear(4, 6, bias=False)
    model.register_buffer("first", model.weight.detach()[:2], persistent=False)
    model.held = [model.weight]
    save_file({"weight": torch.ones(6, 4)}, tmp_path / "m.safetensors")
    plan = loadstone.plan(model, tmp_path / "m.safetensors", dtype=dtype)
    told = [each for each in plan.findings if each.severity == "warning"]
    plan.execute()
    assert torch.equal(model.first, torch.ones(2, 4)) == (dtype is None)
    assert [each.target for each in told] == ([] if dtype is None else ["first"])
    assert model.held[0] is model.weight


def test_random_parts_are_told_apart_only_where_they_are():
    """Compare the check for overlapping regions with sets of elements, for random views."""
    generator = torch.Generator().manual_seed(0)

    def number(most: int) -> int:
        return int(torch.randint(0, most, (), generator=generator))

    apart = 0
    for _ in range(2000):
        base = torch.zeros(2, 3, 4) if number(2) else torch.zeros(4, 6)
        places = torch.arange(24).view(base.shape)
        module, touched = nn.Module(), []
        for name in ("a", "b"):
            index = tuple(
                slice(start := number(size), start + 1 + number(size), 1 + number(2))
                for size in base.shape
            )
            part = base[index].permute(*reversed(range(base.dim()))) if number(2) else base[index]
            module.register_parameter(name, nn.Parameter(part))
            touched.append(set(places[index].flatten().tolist()))
        regions = sorted(map(_region, walk(module)), key=lambda each: each.begin)
        if _are_apart(*regions):
            apart += 1
            assert not touched[0] & touched[1]
        if touched[0] & touched[1]:
            assert len(overlapping(walk(module))) == 2
    assert apart > 500
