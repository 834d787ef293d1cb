"""Encoding to GGUF blocks, against ggml's own code, built from source.

The reference has no wheel on PyPI: ``LOADSTONE_LLAMA_CPP`` names the unpacked source package of
llama-cpp-python (``tools/ggml_oracle.py`` explains how to get it). Without it pytest skips these
tests; ``kernels.GgufEncode`` always checks fingerprints of the same bytes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loadstone
from loadstone import _core

ROOT = Path(__file__).resolve().parents[3]
SOURCE = os.environ.get("LOADSTONE_LLAMA_CPP")
COLUMNS = 1280
COUNT = COLUMNS * 256

# loadstone's names of the formats, and ggml's names.
FORMATS = {
    "q4_0": "q4_0",
    "q4_1": "q4_1",
    "q5_0": "q5_0",
    "q5_1": "q5_1",
    "q8_0": "q8_0",
    "q2_k": "q2_K",
    "q3_k": "q3_K",
    "q4_k": "q4_K",
    "q5_k": "q5_K",
    "q6_k": "q6_K",
    "iq4_nl": "iq4_nl",
    "iq4_xs": "iq4_xs",
    "tq1_0": "tq1_0",
    "tq2_0": "tq2_0",
    "mxfp4-gguf": "mxfp4",
}
# Encodings that search grid points. They are slow, so they are tested with fewer rows.
GRIDS = ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m")
NEED_IMPORTANCE = ("iq2_xxs", "iq2_xs", "iq1_s")
GRID_ROWS = 40
FEW_ROWS = 10


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """ggml's encoders."""
    if SOURCE is None:
        pytest.skip("LOADSTONE_LLAMA_CPP names no unpacked source package of llama-cpp-python")
    sys.path.insert(0, str(ROOT / "tools"))
    from ggml_oracle import Oracle, build  # a script in tools

    return Oracle(build(Path(SOURCE), tmp_path_factory.mktemp("ggml")))


def samples() -> Iterator[tuple[str, np.ndarray]]:
    """Yield F32 values of many kinds, all finite."""
    random = np.random.default_rng(1)
    normal = random.standard_normal(COUNT)
    runs = COUNT // 16
    outliers = normal * 0.01
    outliers[::97] *= 1e4
    bits = random.integers(0, 2**32, COUNT, dtype=np.uint64).astype(np.uint32).view(np.float32)
    yield "normal", normal
    yield "uniform", random.uniform(-1, 1, COUNT)
    yield "positive", random.uniform(0, 1, COUNT)
    yield "negative", -random.uniform(0.5, 1, COUNT)
    yield "student", random.standard_t(2, COUNT)
    yield "cauchy", np.clip(random.standard_t(1, COUNT), -1e30, 1e30)
    yield "zeros", np.zeros(COUNT)
    yield "signs of zeros", np.where(normal < 0, -0.0, 0.0)
    yield "constants", np.repeat(random.standard_normal(runs), 16)
    yield "subnormal", normal * 1e-40
    yield "smallest normal", normal * 1e-37
    yield "too small for a scale", normal * 1e-15
    yield "huge", np.clip(normal * 1e38, -3.4e38, 3.4e38)
    yield "squares overflow", normal * 1e20
    yield "scales overflow", normal * 1e6
    yield "outliers", outliers
    yield "sparse", np.where(random.random(COUNT) < 0.98, 0, normal)
    yield "integers", np.round(normal * 3)
    yield "extremes", np.where(normal < 0, -1.0, 1.0) * np.repeat(random.random(runs), 16)
    yield "scales", normal * np.exp(np.repeat(random.uniform(-30, 5, runs), 16))
    yield "offsets", normal + 10 * np.repeat(random.standard_normal(runs), 16)
    yield "patterns", np.where(np.isfinite(bits), bits, 0)


def rows(numbers: np.ndarray) -> np.ndarray:
    """Return the values as F32 ``[rows, columns]``."""
    return np.ascontiguousarray(numbers, np.float32).reshape(-1, COLUMNS)


def encoded(
    name: str, numbers: np.ndarray, dtype: str = "F32", importance: list[float] | None = None
) -> np.ndarray:
    """Return the GGUF blocks that loadstone encodes from values ``[rows, columns]`` of `dtype`."""
    shape = list(numbers.shape)
    ((_, stored, _),) = _core.scaled.parts_of(name, "", shape, dtype, importance)
    blocks = torch.zeros(stored, dtype=torch.uint8)
    data = torch.from_numpy(numbers.view(np.uint8).reshape(-1).copy())
    places = [blocks.view(-1)]
    good = _core.scaled.encode(name, "", shape, data, dtype, [], places, importance)
    if good < numbers.size:  # the block after the first `good` values has an infinite scale
        decoded = loadstone.dequantize({"data": blocks}, name, tuple(shape), torch.float32)
        assert not decoded.flatten()[good : good + COLUMNS].isfinite().all()
    return blocks.numpy()


def importances() -> dict[str, np.ndarray]:
    """Return column importances: some zeros, heavy-tailed, runs of zeros, and all zeros."""
    random = np.random.default_rng(4)
    some = random.random(COLUMNS)
    made = {
        "zeros for some": np.where(some < 0.125, 0, 4 * some),
        "heavy-tailed": np.exp(random.normal(0, 4, COLUMNS)),
        "zeros in runs": np.repeat(random.random(COLUMNS // 32) < 0.5, 32) * some,
        "zeros": np.zeros(COLUMNS),
    }
    return {name: numbers.astype(np.float32) for name, numbers in made.items()}


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_are_those_of_ggml(name: str, oracle: Any) -> None:
    """Compare the bytes of a few million values of 22 kinds."""
    with np.errstate(all="ignore"):
        for kind, numbers in samples():
            given = rows(numbers)
            assert np.array_equal(encoded(name, given), oracle.encode(FORMATS[name], given)), kind


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_with_an_importance_are_those_of_ggml(name: str, oracle: Any) -> None:
    """Formats that ignore the importance have the same bytes as without it."""
    with np.errstate(all="ignore"):
        for label, importance in importances().items():
            for kind, numbers in samples():
                given = rows(numbers)[:FEW_ROWS]
                made = encoded(name, given, importance=importance.tolist())
                expected = oracle.encode(FORMATS[name], given, importance)
                assert np.array_equal(made, expected), (label, kind)


def same_blocks(
    name: str, given: np.ndarray, importance: np.ndarray | None, oracle: Any
) -> tuple[bool, int]:
    """Compare the blocks that ggml can encode; return the result and the number of blocks."""
    listed = None if importance is None else importance.tolist()
    expected, good = oracle.encode_grid(name, given, importance)
    made = encoded(name, given, importance=listed).reshape(expected.shape)
    return np.array_equal(made[good], expected[good]), int(good.sum())


@pytest.mark.parametrize("name", GRIDS)
def test_points_of_grids_are_those_of_ggml(name: str, oracle: Any) -> None:
    """Compare over a million values, without blocks whose squares overflow, which ggml rejects."""
    choices = importances()
    compared = 0
    with np.errstate(all="ignore"):
        for i, (kind, numbers) in enumerate(samples()):
            given = rows(numbers)[:GRID_ROWS]
            label = list(choices)[i % len(choices) if i > 0 else 0]
            is_same, count = same_blocks(name, given, choices[label], oracle)
            assert is_same, (kind, label)
            compared += count
            if name not in NEED_IMPORTANCE:
                is_same, count = same_blocks(name, given, None, oracle)
                assert is_same, kind
                compared += count
    assert compared * 256 > 900_000


@pytest.mark.parametrize("name", GRIDS)
def test_the_comparison_of_grids_sees_one_bit(name: str, oracle: Any) -> None:
    """Control: the comparison detects one changed bit."""
    given = rows(np.random.default_rng(5).standard_normal(COUNT))[:2]
    importance = importances()["heavy-tailed"]
    assert same_blocks(name, given, importance, oracle) == (True, 10)
    expected, _ = oracle.encode_grid(name, given, importance)
    expected[3, 7] ^= 1
    made = encoded(name, given, importance=importance.tolist()).reshape(expected.shape)
    assert (made != expected).sum() == 1


def test_runs_of_zeros_in_iq3_s_stay_where_decoders_look_for_them(oracle: Any) -> None:
    """ggml shifts the values after a run of zeros; loadstone's blocks decode correctly."""
    given = rows(np.random.default_rng(6).standard_normal(COUNT))[:4].copy()
    given[:, 64:96] = 0
    made = encoded("iq3_s", given)
    assert not np.array_equal(made, oracle.encode("iq3_s", given))
    assert same_blocks("iq3_s", given, None, oracle)[0]
    back = torch.zeros(given.size * 4, dtype=torch.uint8)
    parts = [torch.from_numpy(made.reshape(-1))]
    _core.scaled.decode("iq3_s", "", list(given.shape), "F32", parts, back, "F32")
    error = back.view(torch.float32).numpy().reshape(given.shape) - given
    assert np.square(error).mean() < 0.03


@pytest.mark.parametrize("name", NEED_IMPORTANCE)
def test_some_formats_need_an_importance(name: str) -> None:
    with pytest.raises(loadstone.Error, match="this encoding needs an importance matrix") as caught:
        encoded(name, np.ones((1, COLUMNS), np.float32))
    assert caught.value.expected == "--imatrix"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_narrow_numbers_are_cast_first(name: str, dtype: str, oracle: Any) -> None:
    """BF16 and F16 have the same blocks as the same values in F32."""
    numbers = torch.from_numpy(rows(np.random.default_rng(2).standard_normal(COUNT)))
    narrow = numbers.to({"F16": torch.float16, "BF16": torch.bfloat16}[dtype])
    wide = narrow.float().numpy()
    found = encoded(name, narrow.view(torch.int16).numpy(), dtype)
    assert np.array_equal(found, oracle.encode(FORMATS[name], wide))
    assert np.array_equal(found, encoded(name, wide))


@pytest.mark.parametrize("name", [*FORMATS, *GRIDS])
def test_one_number_changes_one_block(name: str) -> None:
    """Control: one changed value changes its own block only."""
    numbers = rows(np.random.default_rng(3).standard_normal(COUNT))[:GRID_ROWS]
    importance = [1.0] * COLUMNS if name in NEED_IMPORTANCE else None
    before = encoded(name, numbers, importance=importance)
    numbers[7, 300] += 1.5
    after = encoded(name, numbers, importance=importance)
    assert not np.array_equal(before[7], after[7])
    assert np.array_equal(np.delete(before, 7, 0), np.delete(after, 7, 0))
