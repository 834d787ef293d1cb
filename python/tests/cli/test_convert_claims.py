"""Files that claim numbers and extents of experts: a conversion costs no more than the file."""

from collections.abc import Callable
from pathlib import Path

import pytest
from test_hostile_cli import HOSTILE, run_all

MEMORY_KB_MAX = 32 * 1024
OPTIONS = ([], ["--quantize", "nvfp4"], ["--experts", "fused"], ["--experts", "separate"])


@pytest.fixture
def many_numbers(tmp_path: Path, write_safetensors: Callable[..., Path]) -> Path:
    """400 series of one tensor each, which claims to be the last of 100,000."""
    tensors = {f"{k:x}.experts.99999.up_proj.weight": ("U8", [1]) for k in range(400)}
    return write_safetensors(tmp_path / "many.safetensors", tensors)


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_claimed_experts(
    command: Path, tmp_path: Path, many_numbers: Path, options: list[str]
) -> None:
    files = [
        HOSTILE / "safetensors/st_ok_claimed_experts.safetensors",
        HOSTILE / "safetensors/st_ok_expert_number.safetensors",
        many_numbers,
    ]
    commands = [[str(command), "--version"]]
    for number, file in enumerate(files):
        commands.append([str(command), "convert", str(file), str(tmp_path / f"{number}"), *options])
    version, *outcomes = run_all(commands)
    for file, outcome in zip(files, outcomes, strict=True):
        assert outcome.status in (0, 1, 3), (file, outcome.err)
        assert outcome.memory_kb < version.memory_kb + MEMORY_KB_MAX, file
    # Numbers that are none of a series are refused, with the expert's name.
    assert all(outcome.status != 0 for outcome in outcomes[1:])
    assert "experts.99999.up_proj.weight" in outcomes[2].err
