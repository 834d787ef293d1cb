"""Draws the inputs with which tests compare loadstone's and bitsandbytes' kernels."""

from __future__ import annotations

import bnb_oracle as oracle
import numpy as np
import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


SHAPES = [(1, 1), (7, 33), (5, 63), (129, 65), (2, 96), (3, 64, 32), (131,), (4097,)]


BLOCK_SIZES = [32, 64, 128, 4096]


BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def numbers(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return random values of a kind; "ties" are values at or next to midpoints between codes."""
    generator = np.random.default_rng([seed, *kind.encode(), *shape])
    count = int(np.prod(shape))
    values = generator.standard_normal(count).astype(np.float32)
    if kind == "wide":
        values = np.ldexp(values, generator.integers(-125, 125, count)).astype(np.float32)
    if kind == "small":  # down to the smallest F16 values
        values = np.ldexp(values, -generator.integers(0, 24, count)).astype(np.float32)
    if kind == "ties":
        known = [*oracle.MIDDLES.values(), *oracle.VALUES.values(), np.arange(-127, 127) / 254]
        values = generator.choice(np.concatenate(known).astype(np.float32), count)
        values = np.nextafter(values, generator.choice(values, count))
        values[::13] = 1
    if kind == "zeros":
        values[: count // 2] = 0
        values[-(count // 4) :] = 0
    if kind == "subnormal":
        values = (values * 1e-40).astype(np.float32)
    if kind == "special":
        values[generator.integers(0, count, 1 + count // 60)] = np.inf
        values[generator.integers(0, count, 1 + count // 60)] = -np.inf
        values[generator.integers(0, count, 1 + count // 300)] = np.nan
    return torch.from_numpy(values).to(dtype).view(shape)


def same(found: torch.Tensor, expected: torch.Tensor, zeros_alike: bool = False) -> bool:
    """Compare every bit, except that any NaN equals any NaN."""
    if found.dtype is not expected.dtype or found.shape != expected.shape:
        return False
    if not found.is_floating_point():
        return torch.equal(found, expected)
    bits = BITS[found.dtype]
    equal = found.view(bits) == expected.view(bits)
    equal |= found.isnan() & expected.isnan()
    if zeros_alike:
        equal |= (found == 0) & (expected == 0)
    return bool(equal.all())
