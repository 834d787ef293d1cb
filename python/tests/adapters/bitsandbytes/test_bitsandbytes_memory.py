"""Measures peak memory and time of loads that quantize, each in a new process."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

pytest.importorskip("bitsandbytes")
import measured

from bench import checkpoints, measure

ROOM = 64 << 20
LARGE = pytest.param(0.943, marks=pytest.mark.bench)
BITS = {"nf4": 4 + 32 / 64, "nf4, nested": 4 + 8 / 64 + 32 / 64 / 256, "fp4": 4.5, "int8": 8.0}


@pytest.fixture(scope="module", params=[0.3, LARGE])
def checkpoint(request, tmp_path_factory) -> tuple[Path, float]:
    where = tmp_path_factory.mktemp("checkpoints")
    return checkpoints.make(where, "quantized", request.param), request.param


def finished_bytes(gigabytes: float, kind: str) -> int:
    """Return the model's size, with embeddings, output layer and norms in bfloat16."""
    size = 0.0
    for name, shape in checkpoints.shapes("quantized", gigabytes)[1]:
        rows, count = shape[0], 1
        for extent in shape:
            count *= extent
        if not name.endswith("_proj.weight"):
            size += 2 * count
        else:
            size += count * BITS[kind] / 8 + (4 * rows if kind == "int8" else 0)
    return int(size)


@functools.cache
def run(case: str, folder: Path) -> measure.Result:
    return measured.run(case, folder, "bitsandbytes", "transformers")


@pytest.mark.parametrize("kind", BITS)
def test_peak_is_the_quantized_model_and_a_fixed_ring(checkpoint, kind: str) -> None:
    folder, gigabytes = checkpoint
    model = finished_bytes(gigabytes, kind)
    result = run(f"loadstone.transformers, to {kind}", folder)
    print(f"{kind}: {result.grown_anonymous / 1e6:.1f} MB for a model of {model / 1e6:.1f} MB")
    assert result.grown_anonymous > 0.9 * model  # control: the measurement detects the model
    assert result.grown_anonymous <= model + ROOM


def test_the_library_takes_more(checkpoint) -> None:
    folder, gigabytes = checkpoint
    model = finished_bytes(gigabytes, "nf4")
    ours, theirs = (
        run(f"{who}, to nf4", folder) for who in ("loadstone.transformers", "transformers")
    )
    print(f"loadstone {ours.seconds:.2f} s, transformers {theirs.seconds:.2f} s")
    assert theirs.grown_anonymous > ours.grown_anonymous
    # transformers maps the file, and mapped pages count as memory too.
    assert theirs.grown_anonymous + theirs.grown_file > model + ROOM
    assert ours.grown_anonymous + ours.grown_file <= model + ROOM
