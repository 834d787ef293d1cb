"""Tests that the error for an option with a value of the wrong type names the option."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import loadstone
from loadstone import _core

BINDINGS = Path(__file__).parents[2] / "bindings"
# A valid value for every option, as the control.
PLAN: dict[str, Any] = {
    "adapters": [],
    "allow_non_finite": True,
    "allows_unknown_modules": True,
    "bare_modules": [],
    "device_map": [],
    "device_map_mode": "auto",
    "dtype": "F16",
    "expected_sources": [],
    "explained": [],
    "known_sources": [],
    "knows_all_sources": False,
    "local_ranks": 1,
    "max_memory": [],
    "missing": "error",
    "missing_advice": "",
    "missing_of": [],
    "missing_patterns": [],
    "mmap": False,
    "no_split_modules": [],
    "offload_folder": "",
    "quantize": [],
    "recipes": None,
    "rules": "",
    "staging_bytes_max": 1 << 20,
    "strip_prefixes": [],
    "threads": 1,
    "tie": "split",
    "unexpected": "warn",
}
CONVERT: dict[str, Any] = {
    "allow_non_finite": True,
    "beyond_ggml": False,
    "block_dtype": "F32",
    "copy_code": False,
    "dequantize": False,
    "require_lossless": False,
    "dtype": "F16",
    "exclude": [],
    "experts": "keep",
    "folder": "",
    "format": "safetensors",
    "formats": [],
    "imatrix": "",
    "include": [],
    "is_split": False,
    "memory_bytes_max": None,
    "merge": None,
    "metadata": "",
    "mode": "exact",
    "one_file": True,
    "recipes": None,
    "rules": "",
    "shard_bytes_max": None,
    "stem": "",
    "style": "",
    "threads": 1,
    "unexpected": "warn",
}
EXECUTE: dict[str, Any] = {
    "begun": 0,
    "device": None,
    "has_pages": False,
    "interleave": False,
    "own_offload_file": "",
    "partial": False,
    "parts": [],
    "read_ahead_bytes": 0,
    "receipt": "",
}


class Wrong:
    def __repr__(self) -> str:
        return "<the wrong value>"


def catalog_in(folder: Path) -> _core.Catalog:
    save_file({"weight": torch.zeros(2, 2)}, folder / "m.safetensors")
    return loadstone.inspect(folder / "m.safetensors")._core


def plan_with(place: Path, /, **options: Any) -> _core.Plan:
    targets = [_core.Target("weight", [2, 2], "F32")]
    return _core.make_plan(catalog_in(place), targets, False, **options)


def convert_with(place: Path, /, **options: Any) -> object:
    return _core.make_conversion(catalog_in(place), **options)


def execute_with(place: Path, /, **options: Any) -> object:
    weight = torch.empty(2, 2)
    row = (weight.data_ptr(), weight.nbytes, "F32")
    return _core.execute(plan_with(place), [row], **options)


# By file of the bindings: the call and its options.
CALLS: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "plan": (plan_with, PLAN),
    "convert": (convert_with, CONVERT),
    "execute": (execute_with, EXECUTE),
}
OPTIONS = [(file, option) for file, (_, valid) in CALLS.items() for option in valid]


@pytest.mark.parametrize("file", CALLS)
def test_every_option_is_walked(file: str) -> None:
    text = (BINDINGS / f"{file}.cpp").read_text()
    taken = re.findall(r'named\s*\.take(?:<.*?>)?\(\s*"(\w+)"', text)
    assert len(taken) > 5
    assert set(taken) == set(CALLS[file][1])


@pytest.mark.parametrize(("file", "option"), OPTIONS)
def test_a_value_of_the_wrong_type_is_named(file: str, option: str, tmp_path: Path) -> None:
    call, valid = CALLS[file]
    with pytest.raises(loadstone.Error) as caught:
        call(tmp_path, **{option: Wrong()})
    error = caught.value
    assert (error.code, error.field) == ("plan.options", option)
    assert error.found == "<the wrong value>"
    assert error.expected and not set(error.expected) & set("@%")
    assert call(tmp_path, **{option: valid[option]})  # control


@pytest.mark.parametrize("file", CALLS)
def test_an_option_that_is_not_there_is_named(file: str, tmp_path: Path) -> None:
    with pytest.raises(loadstone.Error, match="no option has this name") as caught:
        CALLS[file][0](tmp_path, flavour="sweet")
    assert caught.value.field == "flavour"


def test_numbers_out_of_range_are_named(tmp_path: Path) -> None:
    for option in ("threads", "staging_bytes_max", "local_ranks"):
        for value in (-1, 1 << 70):
            with pytest.raises(loadstone.Error) as caught:
                plan_with(tmp_path, **{option: value})
            assert (caught.value.field, caught.value.found) == (option, str(value))
            assert caught.value.expected == "int, 0 or more"
