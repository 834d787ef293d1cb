"""Measures the peak memory of loads that pack weights, each in a new process."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("modelopt")
import measured

from bench import checkpoints, measure

ROOM = 64 << 20
LARGE = pytest.param(0.91, marks=pytest.mark.bench)
BITS = {"fp8": 8.0, "nvfp4": 4 + 8 / 16}


@pytest.fixture(scope="module", params=[0.3, LARGE])
def checkpoint(request, tmp_path_factory) -> tuple[Path, float]:
    where = tmp_path_factory.mktemp("checkpoints")
    return checkpoints.make(where, "mixture", request.param), request.param


def finished_bytes(gigabytes: float, kind: str) -> int:
    """Return the size of the packed model; embeddings, output layer, routers, norms stay BF16."""
    size = 0.0
    for name, shape in checkpoints.shapes("mixture", gigabytes)[1]:
        bits = BITS[kind] if name.endswith("_proj.weight") else 16
        size += math.prod(shape) * bits / 8
    return int(size)


def run(case: str, folder: Path) -> measure.Result:
    return measured.run(case, folder, "modelopt.torch.quantization", "transformers")


@pytest.mark.parametrize("kind", BITS)
def test_peak_is_the_packed_model_and_a_fixed_ring(
    checkpoint: tuple[Path, float], kind: str
) -> None:
    folder, gigabytes = checkpoint
    model = finished_bytes(gigabytes, kind)
    result = run(f"loadstone.modelopt, to {kind}", folder)
    print(f"{kind}: {result.grown_anonymous / 1e6:.1f} MB for a model of {model / 1e6:.1f} MB")
    assert result.grown_anonymous > 0.9 * model  # control: the measurement detects the model
    assert result.grown_anonymous <= model + ROOM


def test_the_library_takes_more(checkpoint: tuple[Path, float]) -> None:
    """Control: ModelOpt packs a model after loading it, and leaves its experts unpacked."""
    folder, gigabytes = checkpoint
    theirs = run("ModelOpt in memory, to fp8", folder)
    print(f"ModelOpt: {theirs.grown_anonymous / 1e6:.1f} MB")
    assert theirs.grown_anonymous + theirs.grown_file > finished_bytes(gigabytes, "fp8") + ROOM
