"""Tests that loads and conversions of remote files stay within the predicted memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from budget_files import LISTS, write_tensors
from command import run
from remote_fixtures import no_environment, served, server
from remote_server import Server

__all__ = ["no_environment", "served", "server"]

MIB = 1 << 20
FILE = "/large.safetensors"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, served: Server) -> Path:
    tensors = {f"layers.{i}.weight": ("BF16", [2048, 2048], None) for i in range(16)}
    path = write_tensors(tensors, tmp_path_factory.mktemp("large"))
    served.files[FILE] = path.read_bytes()
    small = write_tensors({"t": ("BF16", [1], None)}, tmp_path_factory.mktemp("small"))
    served.files["/small.safetensors"] = small.read_bytes()
    return path


def measured(*arguments: object) -> tuple[int, int]:
    """Return the peak anonymous memory and the planned peak."""
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    promised = document["peak_bytes"]
    peak = document["process"]["anonymous_bytes_peak"]
    return peak, promised["cpu"] if isinstance(promised, dict) else promised


@pytest.fixture(scope="module")
def nothing(large: Path, served: Server) -> int:
    return measured("load", served.url("/small.safetensors"), "--threads", 1)[0]


@pytest.mark.parametrize("threads", [1, 4, 16])
def test_a_load_keeps_its_promise(server: Server, large: Path, nothing: int, threads: int) -> None:
    peak, promised = measured("load", server.url(FILE), "--threads", threads)
    local, local_promised = measured("load", large, "--threads", threads)
    print(f"{threads}: {(peak - nothing) / MIB:.1f} MiB, promised {promised / MIB:.1f}")
    assert peak - nothing <= promised + LISTS
    assert promised <= 1.1 * (peak - nothing) + 8 * MIB
    assert local - nothing <= local_promised + LISTS
    # Control: a remote load needs more memory than a local plan predicts, for its requests.
    assert threads < 16 or peak - nothing > local_promised + LISTS


@pytest.mark.parametrize("threads", [1, 4, 16])
def test_a_conversion_keeps_its_promise(
    server: Server, large: Path, nothing: int, threads: int, tmp_path: Path
) -> None:
    """The output is one file without a receipt, because digests need memory (docs/receipt.md)."""
    limit = 12 * MIB
    for options in (["--threads", threads], ["--max-memory", limit]):
        out = tmp_path / "out.safetensors"
        peak, promised = measured("convert", server.url(FILE), out, *options)
        print(f"{options}: {(peak - nothing) / MIB:.1f} MiB, promised {promised / MIB:.1f}")
        assert peak - nothing <= promised
        assert promised <= limit or "--threads" in options


def test_a_plan_holds_where_the_file_moved(server: Server, large: Path, tmp_path: Path) -> None:
    """The predicted memory depends on the file's location at execution, not at planning."""
    for source, moved in ((server.url(FILE), large.parent), (large, server.url("/"))):
        plan = tmp_path / "plan.json"
        assert run("plan", source, "-o", plan).returncode == 0
        server.files["/model.safetensors"] = server.files[FILE]
        done = run("load", "--plan", plan, moved)
        assert "peak_bytes" not in done.stderr
        document = json.loads(plan.read_text())
        document["peak_bytes"]["cpu"] += 1
        plan.write_text(json.dumps(document))
        done = run("load", "--plan", plan, source if source != large else large.parent)
        assert done.returncode != 0
        assert "peak_bytes" in done.stderr
