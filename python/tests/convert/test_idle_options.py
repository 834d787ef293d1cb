"""Options of conversions and merges that have no effect or are out of range."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import loadstone

IDLE: list[dict[str, Any]] = [
    {"parts": 3},
    {"trust_code": True},
    {"converter": "llama.cpp"},
]
# For each option: a value below the range, one above, one of a wrong type, and a valid value.
RANGES: dict[str, tuple[Any, ...]] = {
    "threads": (-1, 2**32, 1.5, 1),
    "shard_size": (-1, 2**63, "one", "9" * 400, 1000),
    "max_memory": (-1, 2**63, "one", "9" * 400, "1GiB"),
    "part": ((-1, 2), (1, 2**32), (1.5, 2), (1, 1)),
}
SEEDS = (-1, 2**64, 1.5, 2**64 - 1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "in.safetensors"
    save_file({"a.weight": torch.randn(4, 4)}, path)
    return path


def refused(field: str, request: Any) -> loadstone.Error:
    with pytest.raises(loadstone.Error) as caught:
        request()
    assert (caught.value.code, caught.value.field) == ("plan.options", field)
    assert field in str(caught.value)
    return caught.value


@pytest.mark.parametrize("options", IDLE, ids=str)
def test_an_option_without_effect_is_refused(
    file: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    field = next(iter(options))
    refused(field, lambda: loadstone.convert(file, tmp_path / "out.safetensors", **options))


@pytest.mark.parametrize("which", ["convert", "merge"])
@pytest.mark.parametrize("option", RANGES)
def test_values_out_of_range_are_refused_by_name(
    file: Path, tmp_path: Path, option: str, which: str
) -> None:
    def write(value: Any) -> None:
        if which == "convert":
            loadstone.convert(file, tmp_path / "out", **{option: value})
        else:
            loadstone.merge({file: 1.0}, tmp_path / "out", **{option: value})

    *wrong, right = RANGES[option]
    for value in wrong:
        refused(option, lambda value=value: write(value))
    write(right)


def test_integers_of_numpy_are_taken(file: Path, tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"threads": np.int64(1), "max_memory": np.uint32(2**30)}
    loadstone.convert(file, tmp_path / "out.safetensors", **numbers)
    with pytest.raises(loadstone.Error, match="threads"):
        loadstone.convert(file, tmp_path / "out.safetensors", threads=np.float64(1))


def test_a_seed_out_of_range_is_refused_by_name(file: Path, tmp_path: Path) -> None:
    def write(seed: Any) -> None:
        sources = [file, (file, 1.0)]
        out = tmp_path / "out.safetensors"
        loadstone.merge(sources, out, method="dare-linear", density=0.5, seed=seed)

    for value in SEEDS[:-1]:
        error = refused("seed", lambda value=value: write(value))
        assert (error.found, error.expected) == (repr(value), f"0 to {2**64 - 1}")
    write(SEEDS[-1])
