"""Tests that random files give the same bytes at every entry point.

The test draws the tensors of each file, and compares the result of each entry point with them. The
control flips one bit of the file, and every entry point must then return a different value. For a
longer run:

    python python/tests/files/test_entry_points.py --minutes 30
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import command
import pytest
import torch
from random_files import RandomFile, draw, flip, raw, read_safetensors

import loadstone
import loadstone.torch

FILES = 400
FILES_A_TEST = 20


def model_of(tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Return a model with these tensors: floats as parameters, the others as buffers."""
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        empty = torch.zeros(tensor.shape, dtype=tensor.dtype)
        if tensor.is_floating_point():
            module.register_parameter(last, torch.nn.Parameter(empty, requires_grad=False))
        else:
            module.register_buffer(last, empty)
    return root


def random_index(source: random.Random, shape: torch.Size) -> Any:
    """Return an index of integers, slices with steps, ``...`` and ``None``."""
    items: list[Any] = []
    for extent in shape[: source.randint(0, len(shape))]:
        if extent and source.random() < 0.25:
            items.append(source.randrange(-extent, extent))
        else:
            begin, end = (source.choice((None, source.randint(-2, extent + 2))) for _ in range(2))
            items.append(slice(begin, end, source.choice((None, 1, 2, 3))))
    if source.random() < 0.3:
        items.insert(source.randint(0, len(items)), None)
    if source.random() < 0.3:
        items.append(...)
    return tuple(items)


def by_open(file: RandomFile, source: random.Random, _: Path) -> dict[str, torch.Tensor]:
    """Read whole tensors with ``loadstone.open``, after comparing slices of them."""
    with loadstone.open(file.path) as opened:
        for name, tensor in file.tensors.items():
            index = random_index(source, tensor.shape)
            assert_same({f"{name}{index}": tensor[index]}, {f"{name}{index}": opened[name][index]})
        return {name: opened[name].tensor() for name in opened}


def by_safe_open(file: RandomFile, source: random.Random, _: Path) -> dict[str, torch.Tensor]:
    """Read whole tensors with ``loadstone.safe_open``, after comparing slices of them."""
    with loadstone.safe_open(file.path, framework="pt") as opened:
        for name, tensor in file.tensors.items():
            index = random_index(source, tensor.shape)
            assert_same(
                {f"{name}{index}": tensor[index]},
                {f"{name}{index}": opened.get_slice(name)[index]},
            )
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def by_load_file(file: RandomFile, source: random.Random, _: Path) -> dict[str, torch.Tensor]:
    return loadstone.load_file(file.path)


def by_torch_load_file(file: RandomFile, source: random.Random, _: Path) -> dict[str, torch.Tensor]:
    """Read with ``loadstone.torch.load_file``, or ``load`` from the bytes of one file."""
    if file.path.is_file() and source.random() < 0.5:
        return loadstone.torch.load(file.path.read_bytes())
    return loadstone.torch.load_file(file.path, threads=source.randint(1, 3))


def by_load(file: RandomFile, source: random.Random, _: Path) -> dict[str, torch.Tensor]:
    """Load into a skeleton, with copies or with views of the file."""
    with loadstone.skeleton():
        model = model_of(file.tensors)
    loadstone.load(
        model,
        file.path,
        threads=source.randint(1, 3),
        mmap=source.random() < 0.5,
        staging_bytes_max=source.choice((1 << 20, 64 << 20)),
    )
    loadstone.audit(model).require_real()
    return model.state_dict()


def by_saved_plan(file: RandomFile, source: random.Random, folder: Path) -> dict[str, torch.Tensor]:
    """Save a plan, read it, and execute it on a model that has values."""
    model = model_of(file.tensors)
    loadstone.plan(model, file.path).save(folder / "plan.json")
    loadstone.Plan.load(folder / "plan.json").execute(into=model, threads=source.randint(1, 3))
    return model.state_dict()


def by_convert(file: RandomFile, source: random.Random, folder: Path) -> dict[str, torch.Tensor]:
    """Convert in Python or with the command; parse the safetensors output in this file."""
    target = folder / "converted.safetensors"
    if source.random() < 0.2:
        command.output("convert", file.path, target, "--threads", source.randint(1, 3))
    else:
        loadstone.convert(file.path, target, threads=source.randint(1, 3))
    return read_safetensors(target)


ENTRY_POINTS: dict[str, Callable[[RandomFile, random.Random, Path], dict[str, torch.Tensor]]] = {
    "open": by_open,
    "safe_open": by_safe_open,
    "load_file": by_load_file,
    "torch.load_file": by_torch_load_file,
    "load": by_load,
    "saved plan": by_saved_plan,
    "convert": by_convert,
}


def assert_same(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    """Compare names, dtypes, shapes and bytes."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        other = found[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), name
        assert raw(other) == raw(tensor), name


def compare_all(seed: int) -> None:
    """Draw a file and read it at every entry point."""
    source = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "made")
        made.mkdir()
        file = draw(source, made)
        for name, entry_point in ENTRY_POINTS.items():
            try:
                assert_same(file.tensors, entry_point(file, source, Path(folder)))
            except Exception as error:
                error.add_note(f"seed {seed}, {file.kind}, by {name}")
                raise


@pytest.mark.parametrize("first", range(0, FILES, FILES_A_TEST))
def test_every_entry_point_gives_the_bytes_of_the_file(first: int) -> None:
    for seed in range(first, first + FILES_A_TEST):
        compare_all(seed)


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_one_flipped_bit_is_seen_by_each(name: str, tmp_path: Path) -> None:
    seen = 0
    for seed in range(40):
        source = random.Random(seed)
        made = tmp_path / str(seed)
        made.mkdir()
        file = draw(source, made)
        if file.kind != "safetensors" or not flip(file, source):
            continue
        with pytest.raises((AssertionError, loadstone.Error)):
            assert_same(file.tensors, ENTRY_POINTS[name](file, source, made))
        seen += 1
    assert seen


def main() -> None:
    """Compare for some minutes, with files that differ from those of earlier runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 40))
    options = parser.parse_args()
    end, seed = time.monotonic() + 60 * options.minutes, options.seed
    while time.monotonic() < end:
        compare_all(seed)
        seed += 1
    print(f"{seed - options.seed} files from seed {options.seed}: no difference")


if __name__ == "__main__":
    main()
