"""Fixtures: the command under test, and checkpoints written byte by byte without any library."""

import json
import math
import os
import struct
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from terminals import BIG

REPOSITORY = Path(__file__).resolve().parents[3]
COMMAND = Path(os.environ.get("LOADSTONE_CLI", REPOSITORY / ".venv/bin/loadstone"))
DTYPE_BITS = {"F64": 64, "F32": 32, "BF16": 16, "F16": 16, "U8": 8, "BOOL": 8}

Run = Callable[..., subprocess.CompletedProcess[str]]
WriteFile = Callable[..., Path]


@pytest.fixture(scope="session")
def command() -> Path:
    assert COMMAND.is_file(), f"{COMMAND} is not there: build it, or name it in LOADSTONE_CLI"
    return COMMAND


@pytest.fixture(scope="session")
def run(command: Path) -> Run:
    """Return a function that runs the command, and checks its exit status if `status` is given."""

    def run_command(
        *arguments: object, status: int | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [command, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            **options,
        )
        if status is not None:
            assert done.returncode == status, (arguments, done.stdout, done.stderr)
        return done

    return run_command


def write_safetensors(
    path: Path,
    tensors: Mapping[str, tuple[str, list[int]]],
    values: bytes | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write a file with these dtypes and shapes; without `values` its data is a hole of zeros."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + (values or b""))
        file.truncate(8 + len(text) + end)
    return path


@pytest.fixture(scope="session", name="write_safetensors")
def write_safetensors_fixture() -> WriteFile:
    return write_safetensors


SMALL = {"embed.weight": ("F32", [4, 2]), "norm.weight": ("BF16", [2])}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Write a checkpoint of two tensors that contain zeros."""
    return write_safetensors(tmp_path / "small.safetensors", SMALL, metadata={"made by": "a test"})


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """Write a file of zeros whose load, as F64 by one thread, takes long enough to interrupt."""
    tensors = {f"layers.{i}.weight": ("BF16", [BIG // 2 // 16]) for i in range(16)}
    return write_safetensors(tmp_path / "big.safetensors", tensors)


@pytest.fixture
def write_skeleton(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a skeleton of parameters, given (dtype, shape) by name."""

    def write(
        targets: Mapping[str, tuple[str, list[int]]], file_name: str = "skeleton.json"
    ) -> Path:
        rows = [
            {"name": name, "shape": shape, "dtype": dtype, "kind": "parameter", "tie_of": None}
            for name, (dtype, shape) in targets.items()
        ]
        path = tmp_path / file_name
        path.write_text(json.dumps({"targets": rows}))
        return path

    return write


@pytest.fixture
def incomplete(write_skeleton: Callable[..., Path]) -> Path:
    """Write a skeleton that needs two tensors that the small checkpoint lacks."""
    more = {"head.weight": ("F32", [4, 2]), "head.bias": ("F32", [4])}
    return write_skeleton(SMALL | more, "incomplete.json")
