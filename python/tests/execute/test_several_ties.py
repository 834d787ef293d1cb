"""Ties with many names: the load compares every stored name, in every dtype."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from remote_fixtures import no_environment, served, server
from remote_server import Server
from safetensors.torch import save_file
from torch import nn

import loadstone

__all__ = ["no_environment", "served", "server"]

NAMES = "abcde"
SHAPE = (6, 4)


def tied(count: int, dtype: torch.dtype = torch.float32, shape: tuple[int, int] = SHAPE) -> Any:
    """Return layers that share one weight, whose first name is ``a.weight``."""
    model = nn.ModuleDict({name: nn.Linear(*shape[::-1], bias=False) for name in NAMES[:count]})
    model.to(dtype)
    for name in NAMES[1:count]:
        model[name].weight = model["a"].weight
    return model


def write(path: Path, wrong: Iterable[int], count: int, dtype: torch.dtype, by: float) -> None:
    """Write a file with a value under each name; the layers in ``wrong`` differ in one element."""
    value = torch.arange(1, 1 + SHAPE[0] * SHAPE[1], dtype=torch.float64).reshape(SHAPE) / 32
    tensors = {}
    for index, name in enumerate(NAMES[:count]):
        own = value.clone()
        own[-1, -1] += by * (index in wrong)
        tensors[f"{name}.weight"] = own.to(dtype)
    save_file(tensors, path)


def told(load: Callable[[], Any]) -> set[str]:
    """Return the tied names that a load's warnings mention."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load()
    found = (re.match(r"'(.)\.weight' is tied to 'a\.weight'", str(w.message)) for w in caught)
    return {each[1] for each in found if each}


def _saved(path: Path, count: int, dtype: torch.dtype) -> Any:
    model = tied(count, dtype)
    loadstone.plan(model, path).save(path.with_suffix(".json"))
    return loadstone.Plan.load(path.with_suffix(".json")).execute(model=model)


LOADS: dict[str, Callable[[Path, int, torch.dtype], Any]] = {
    "load": lambda path, count, dtype: loadstone.load(tied(count, dtype), path),
    "in place": lambda path, count, dtype: loadstone.load(tied(count, dtype), path, in_place=True),
    "saved plan": _saved,
}
# Difference of two values that are equal in the next narrower dtype.
STEPS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# Number of tied names, and the positions whose value differs. Position 0 makes all others differ.
WRONG = [(4, {1}), (4, {2}), (4, {3}), (2, {1}), (5, {4}), (5, {1, 3}), (4, {0}), (4, set())]


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize("door", LOADS)
@pytest.mark.parametrize(("count", "wrong"), WRONG)
def test_each_name_is_compared(
    count: int, wrong: set[int], door: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = tmp_path / "m.safetensors"
    write(path, wrong, count, dtype, STEPS[dtype])
    expected = {NAMES[i] for i in range(1, count) if (i in wrong) != (0 in wrong)}
    assert told(lambda: LOADS[door](path, count, dtype)) == expected


@pytest.mark.parametrize(("count", "wrong"), WRONG)
def test_a_strict_load_refuses_each(count: int, wrong: set[int], tmp_path: Path) -> None:
    path, skeleton = tmp_path / "m.safetensors", tmp_path / "s.json"
    write(path, wrong, count, torch.float32, 1e-6)
    loadstone.save_skeleton(tied(count), skeleton)
    done = run("load", path, "--skeleton", skeleton, "--strict")
    assert (done.returncode != 0) == bool(wrong)
    assert ("different values" in done.stderr) == bool(wrong)
    if not wrong:
        loadstone.load(tied(count), path, strict=True)
        return
    with pytest.raises(loadstone.Error, match="different values") as caught:
        loadstone.load(tied(count), path, strict=True)
    assert caught.value.code == "plan.tie"


def requests(server: Server, tensors: dict[str, torch.Tensor], folder: Path, model: Any) -> int:
    path = folder / "m.safetensors"
    save_file(tensors, path)
    server.files["/m.safetensors"] = path.read_bytes()
    server.seen.clear()
    loadstone.load(model, server.url("/m.safetensors"))
    return len(server.seen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_comparison_over_http_asks_in_megabytes(
    server: Server, dtype: torch.dtype, tmp_path: Path
) -> None:
    rows, columns = 4096, 1024  # 8 MiB as BF16
    weight = torch.randn(rows, columns).to(dtype)
    counts = []
    for names in ("a", "ab"):
        tensors = {f"{name}.weight": weight.clone() for name in names}
        counts.append(requests(server, tensors, tmp_path, tied(2, dtype, (rows, columns))))
    windows = rows * columns // 2**20  # a window of the comparison has 2**20 elements
    # Control: the load requests both tensors.
    assert 2 <= counts[1] - counts[0] <= 2 * windows + 2
