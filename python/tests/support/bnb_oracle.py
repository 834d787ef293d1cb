"""Encodes and decodes bitsandbytes' formats in numpy, without bitsandbytes, torch or loadstone.

Inputs are float32 arrays that contain the source dtype's values. docs/formats/bitsandbytes.md
describes the formats in prose.
"""

from __future__ import annotations

import numpy as np

F32 = np.float32
NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    F32,
)
_MAGNITUDES = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], F32) / F32(12)
FP4 = np.concatenate([_MAGNITUDES, -_MAGNITUDES]) + F32(0)  # turns -0.0 into 0.0
VALUES = {"nf4": NF4, "fp4": FP4}
# Codes sorted by value. Two codes of fp4 decode to 0; the one without a sign comes first.
ORDER = {name: np.argsort(values, kind="stable") for name, values in VALUES.items()}
MIDDLES = {
    name: (values[ORDER[name]][:-1] + values[ORDER[name]][1:]) / F32(2)
    for name, values in VALUES.items()
}
_CUDA_PIVOTS = np.array(
    [0.00260417, 0.0859375, 0.20833333, 0.29166667, 0.4166667, 0.583333, 0.8333333], F32
)
_CUDA_CODES = np.array([0, 1, 6, 7, 4, 5, 2, 3])
_LEAST = F32(1e-38)


def cuda_boundaries(encoding: str) -> np.ndarray:
    """Return the boundaries between the codes of the dialect ``bnb-cuda``, ascending."""
    if encoding == "nf4":
        return MIDDLES["nf4"]
    return np.concatenate([-_CUDA_PIVOTS[::-1], _CUDA_PIVOTS])


def dynamic_map() -> np.ndarray:
    """Return the 256 values to which the codes of nested scales decode."""
    numbers = [F32(0), F32(1)]
    for i in range(7):
        count = 2**i + 1
        place = np.arange(count)
        step = np.float64((F32(1) - F32(0.1)) / F32(count - 1))
        up = np.float64(F32(0.1)) + step * place
        down = 1 - step * (count - 1 - place)
        ends = np.where(place < count // 2, up, down).astype(F32)
        middles = (ends[:-1] + ends[1:]) / F32(2) * F32(10.0 ** (i - 6))
        numbers += [*middles, *-middles]
    return np.sort(np.array(numbers, F32))


MAP = dynamic_map()
_MAP_MIDDLES = F32(0.5) * (MAP[:-1] + MAP[1:])
_STEPS = np.searchsorted(
    _MAP_MIDDLES, F32(-1) + F32(2) * np.arange(65536, dtype=F32) / F32(65535)
).astype(np.uint8)


def _codes(scaled: np.ndarray, encoding: str, dialect: str) -> np.ndarray:
    middles, order = MIDDLES[encoding], ORDER[encoding]
    if dialect == "bnb-cpu":
        return order[np.searchsorted(middles, scaled)]  # NaN gets the last code
    if encoding == "nf4":
        return (scaled[:, None] > middles).sum(1)
    ranks = (np.abs(scaled)[:, None] > _CUDA_PIVOTS).sum(1)
    return _CUDA_CODES[ranks] + 8 * (scaled < 0)


def encode_4bit(
    numbers: np.ndarray, encoding: str, block_size: int = 64, dialect: str = "bnb-cpu"
) -> tuple[np.ndarray, np.ndarray]:
    """Return the packed codes, and the scales of the blocks."""
    scales, codes = [], []
    with np.errstate(all="ignore"):
        for begin in range(0, len(numbers), block_size):
            block = numbers[begin : begin + block_size]
            absmax = divisor = np.abs(block).max()
            if dialect == "bnb-cpu":
                divisor = np.maximum(absmax, _LEAST)
            if len(block) == block_size or dialect == "bnb-cuda":
                scaled = block * (F32(1) / divisor)
            else:
                absmax, scaled = divisor, block / divisor
            scales.append(absmax)
            codes.append(_codes(scaled, encoding, dialect))
    if len(numbers) % 2:
        codes.append(_codes(np.zeros(1, F32), encoding, dialect))
    flat = np.concatenate(codes).astype(np.uint8)
    return flat[0::2] << 4 | flat[1::2], np.array(scales, F32)


def decode_4bit(
    data: np.ndarray, absmax: np.ndarray, count: int, encoding: str, block_size: int = 64
) -> np.ndarray:
    codes = np.stack([data >> 4, data & 15], 1).reshape(-1)[:count]
    with np.errstate(all="ignore"):
        return VALUES[encoding][codes] * absmax[np.arange(count) // block_size]


def encode_nested(
    absmax: np.ndarray, offset: np.float32, dialect: str = "bnb-cpu"
) -> tuple[np.ndarray, np.ndarray]:
    """Quantize scales; return their codes, and the scales of these codes."""
    rest = absmax - offset
    scales, codes = [], []
    for begin in range(0, len(rest), 256):
        block = rest[begin : begin + 256]
        most = np.abs(block).max()
        scales.append(most)
        if most == 0:
            codes.append(np.full(len(block), 0 if dialect == "bnb-cpu" else 127))
            continue
        value = block * (F32(1) / most)
        if dialect == "bnb-cuda":
            codes.append(np.searchsorted(_MAP_MIDDLES, value))
            continue
        share = (np.clip(value, F32(-1), F32(1)) + F32(1)) * F32(0.5)
        step = (share.astype(np.float64) * 65535 + 0.5).astype(F32)  # one rounding
        codes.append(_STEPS[step.astype(np.int64)])
    return np.concatenate(codes).astype(np.uint8), np.array(scales, F32)


def decode_nested(data: np.ndarray, nested_absmax: np.ndarray, offset: np.float32) -> np.ndarray:
    return MAP[data] * nested_absmax[np.arange(len(data)) // 256] + offset


def encode_int8(numbers: np.ndarray, dialect: str = "bnb-cpu") -> tuple[np.ndarray, np.ndarray]:
    """Return the codes of a matrix, and one scale per row."""
    with np.errstate(all="ignore"):
        halves = numbers.astype(np.float16).astype(F32)
        absmax = np.abs(halves).max(1)
        cpu = dialect == "bnb-cpu"
        factor = F32(1) / absmax * F32(127) if cpu else F32(127) / absmax
        rounded = np.rint(halves * factor[:, None])
    return np.where(np.isfinite(rounded), rounded, 0).astype(np.int8), absmax


def decode_int8(data: np.ndarray, absmax: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return data.astype(F32) * absmax[:, None] * F32(0.007874015718698502)
