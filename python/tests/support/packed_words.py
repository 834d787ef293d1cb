"""Packs codes of a few bits contiguously into words of 32 bits."""

from __future__ import annotations

import numpy as np
import torch


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack along the last dimension, low bits first; a code may span two words.

    Args:
        codes: integers from 0 to 2^bits - 1.

    Returns:
        I32 words, the last one padded with zeros.
    """
    assert int(codes.min()) >= 0 and int(codes.max()) < 1 << bits
    each = codes.numpy().astype(np.uint8)[..., None]
    stream = np.unpackbits(each, axis=-1, count=bits, bitorder="little")
    stream = stream.reshape(*codes.shape[:-1], -1)
    stream = np.pad(stream, [(0, 0)] * (stream.ndim - 1) + [(0, -stream.shape[-1] % 32)])
    packed = np.packbits(stream, axis=-1, bitorder="little")
    return torch.from_numpy(np.ascontiguousarray(packed).view("<i4"))


def unpack(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack the first ``count`` codes of each row."""
    unsigned = words.to(torch.int64) & 0xFFFFFFFF
    codes = []
    for i in range(count):
        word, shift = divmod(i * bits, 32)
        value = unsigned[..., word] >> shift
        if shift + bits > 32:
            value = value | unsigned[..., word + 1] << (32 - shift)
        codes.append(value & ((1 << bits) - 1))
    return torch.stack(codes, -1)
