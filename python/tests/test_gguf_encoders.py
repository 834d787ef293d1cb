"""Numbers to blocks of GGUF beside ggml's own code, built from source.

The reference is no package that pip installs as a wheel: ``LOADSTONE_LLAMA_CPP`` names the unpacked
source package of llama-cpp-python (``tools/ggml_oracle.py`` says how to get it). Without it these
tests are skipped; ``kernels.GgufEncode`` holds the same bytes as fingerprints, always.
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

from loadstone import _core

ROOT = Path(__file__).resolve().parents[2]
SOURCE = os.environ.get("LOADSTONE_LLAMA_CPP")
COLUMNS = 1280
COUNT = COLUMNS * 256

# Our names, and ggml's.
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


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """ggml's encoders."""
    if SOURCE is None:
        pytest.skip("LOADSTONE_LLAMA_CPP names no unpacked source package of llama-cpp-python")
    sys.path.insert(0, str(ROOT / "tools"))
    from ggml_oracle import Oracle, build  # a program, no package

    return Oracle(build(Path(SOURCE), tmp_path_factory.mktemp("ggml")))


def samples() -> Iterator[tuple[str, np.ndarray]]:
    """F32 numbers of many kinds, all finite."""
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
    """As F32 ``[rows, columns]``."""
    return np.ascontiguousarray(numbers, np.float32).reshape(-1, COLUMNS)


def encoded(name: str, numbers: np.ndarray, dtype: str = "F32") -> np.ndarray:
    """Our blocks of numbers ``[rows, columns]``, whose bytes are of `dtype`."""
    ((_, shape, _),) = _core.scaled.parts_of(name, "", list(numbers.shape), dtype)
    blocks = torch.zeros(shape, dtype=torch.uint8)
    data = torch.from_numpy(numbers.view(np.uint8).reshape(-1).copy())
    places = [blocks.view(-1)]
    good = _core.scaled.encode(name, "", list(numbers.shape), data, dtype, [], places)
    assert good == numbers.size
    return blocks.numpy()


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_are_those_of_ggml(name: str, oracle: Any) -> None:
    """Byte for byte, for a few million numbers of 22 kinds."""
    with np.errstate(all="ignore"):
        for kind, numbers in samples():
            given = rows(numbers)
            assert np.array_equal(encoded(name, given), oracle.encode(FORMATS[name], given)), kind


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_narrow_numbers_are_cast_first(name: str, dtype: str, oracle: Any) -> None:
    """BF16 and F16 have the blocks of the same numbers as F32."""
    numbers = torch.from_numpy(rows(np.random.default_rng(2).standard_normal(COUNT)))
    narrow = numbers.to({"F16": torch.float16, "BF16": torch.bfloat16}[dtype])
    wide = narrow.float().numpy()
    found = encoded(name, narrow.view(torch.int16).numpy(), dtype)
    assert np.array_equal(found, oracle.encode(FORMATS[name], wide))
    assert np.array_equal(found, encoded(name, wide))


@pytest.mark.parametrize("name", FORMATS)
def test_one_number_changes_one_block(name: str) -> None:
    """The control: another number is seen, and by its own block alone."""
    numbers = rows(np.random.default_rng(3).standard_normal(COUNT))
    before = encoded(name, numbers)
    numbers[7, 300] += 1.5
    after = encoded(name, numbers)
    assert not np.array_equal(before[7], after[7])
    assert np.array_equal(np.delete(before, 7, 0), np.delete(after, 7, 0))
