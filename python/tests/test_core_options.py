"""Options of ``_core.make_plan`` with values of the wrong type: an error that names the option."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import loadstone
from loadstone import _core

SOURCE = Path(__file__).parents[1] / "bindings" / "plan.cpp"
OPTIONS = sorted(set(re.findall(r'named\s*\.take(?:<.*?>)?\(\s*"(\w+)"', SOURCE.read_text())))
# One that every option of its kind takes, for the control.
VALID: dict[str, Any] = {
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
NEEDED = {"unexpected": "warn", "missing": "error"}


class Wrong:
    def __repr__(self) -> str:
        return "<the wrong value>"


def plan_with(folder: Path, **options: Any) -> object:
    save_file({"weight": torch.zeros(2, 2)}, folder / "m.safetensors")
    catalog = loadstone.inspect(folder / "m.safetensors")._core
    targets = [_core.Target("weight", [2, 2], "F32")]
    return _core.make_plan(catalog, targets, False, **NEEDED | options)


def test_every_option_is_walked() -> None:
    assert len(OPTIONS) > 20
    assert set(VALID) == set(OPTIONS)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_value_of_the_wrong_type_is_named(option: str, tmp_path: Path) -> None:
    with pytest.raises(loadstone.Error) as caught:
        plan_with(tmp_path, **{option: Wrong()})
    error = caught.value
    assert (error.code, error.field) == ("plan.options", option)
    assert error.found == "<the wrong value>"
    assert error.expected and not set(error.expected) & set("@%")
    assert plan_with(tmp_path, **{option: VALID[option]})  # the control


def test_numbers_out_of_range_are_named(tmp_path: Path) -> None:
    for option in ("threads", "staging_bytes_max", "local_ranks"):
        for value in (-1, 1 << 70):
            with pytest.raises(loadstone.Error) as caught:
                plan_with(tmp_path, **{option: value})
            assert (caught.value.field, caught.value.found) == (option, str(value))
            assert caught.value.expected == "int, 0 or more"
