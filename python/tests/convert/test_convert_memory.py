"""Conversions into folders, whose shards have digests, stay within the planned memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from budget_files import write_tensors
from command import output

MB = 1_000_000


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write rows that only partly fill a digest's blocks, so windows wait for their neighbours."""
    tensors = {
        f"model.layers.{i}.mlp.up_proj.weight": ("BF16", [2000, 4124], None) for i in range(6)
    }
    folder = tmp_path_factory.mktemp("memory")
    write_tensors(tensors, folder)
    return folder


def measured(*arguments: object) -> tuple[int, int]:
    """Return the peak anonymous memory and the planned one."""
    document = json.loads(output(*arguments, "--json"))
    return document["process"]["anonymous_bytes_peak"], document["peak_bytes"]


@pytest.fixture(scope="module")
def nothing(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Return the memory of converting one value, which is little more than an idle process."""
    folder = tmp_path_factory.mktemp("nothing")
    small = write_tensors({"t": ("BF16", [1], None)}, folder)
    return measured("convert", small, folder / "out.safetensors", "--threads", 1)[0]


@pytest.mark.parametrize(
    "options", [["--dtype", "f16"], ["--quantize", "nf4", "--receipt", "xxh3-128"]]
)
@pytest.mark.parametrize("limit", [6 * MB, 8 * MB, 16 * MB, None])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_promise_is_kept(
    source: Path, nothing: int, tmp_path: Path, options: list[str], limit: int | None, threads: int
) -> None:
    most = [] if limit is None else ["--max-memory", limit]
    command = ("convert", source, tmp_path / "out", *options, "--shard-size", "20MB", *most)
    peak, promised = measured(*command, "--threads", threads)
    print(f"{(peak - nothing) / MB:.1f} MB, promised {promised / MB:.1f}")
    assert peak - nothing <= promised
    assert limit is None or promised <= limit
