"""Tests that docs/transformers-types.md covers transformers' registry, and tests each converter."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import loadstone
from tools import coverage_table

transformers = pytest.importorskip("transformers")

from transformers import core_model_loading as library  # noqa: E402


def test_every_converter_traced_and_run(tmp_path: Path):
    targets, entries = 0, coverage_table.registry()
    for transforms in entries.values():
        for converter in coverage_table.converters(transforms):
            targets += coverage_table.check_converter(converter, tmp_path)
    assert targets >= 171


class Fickle(library.ConversionOps):
    """An operation that reverses its inputs on every second call, so that a trace is wrong."""

    turn = 0

    def convert(self, input_dict: Any, *args: Any, **kwargs: Any) -> Any:
        Fickle.turn += 1
        tensors = [item[0] for item in input_dict.values()][:: 1 if Fickle.turn % 2 else -1]
        return {"ab": torch.cat(tensors)}


def test_the_check_of_converters_sees_a_difference(tmp_path: Path):
    with pytest.raises(AssertionError, match=r"Fickle: .*ab differs"):
        coverage_table.check_converter(
            library.WeightConverter(["a", "b"], "ab", [Fickle()]), tmp_path
        )


class Peeking(library.ConversionOps):
    def convert(self, input_dict: Any, *args: Any, **kwargs: Any) -> Any:
        (value,) = (item[0] for item in input_dict.values())
        return {"b": value if value[0, 0] > 0 else -value}


def test_the_check_of_converters_sees_what_is_refused(tmp_path: Path):
    with pytest.raises(loadstone.PlanError) as caught:
        coverage_table.check_converter(library.WeightConverter("a", "b", [Peeking()]), tmp_path)
    assert caught.value.code in ("plan.data_dependent", "plan.untraceable")


def test_the_table_names_every_key_of_the_registry():
    table = coverage_table.table_of_page()
    rows = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
    assert rows == set(coverage_table.registry())
    assert transformers.__version__ in table


@pytest.mark.sweep
def test_the_table_is_what_the_registry_gives():
    with tempfile.TemporaryDirectory() as folder:
        rows = coverage_table.make_rows(Path(folder))
    assert coverage_table.table_of_page() == coverage_table.make_table(rows)
