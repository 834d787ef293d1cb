"""Makes tensors of every dtype and layout that torch's files can contain."""

from __future__ import annotations

from typing import Any

import torch

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32,
    torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


LAYOUTS: dict[str, dict[str, Any]] = {
    "zip": {},
    "legacy": {"_use_new_zipfile_serialization": False},
    "protocol 3": {"pickle_protocol": 3},
    "protocol 4": {"pickle_protocol": 4},
    "protocol 5": {"pickle_protocol": 5},
}


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor of random bytes, which include NaN with payloads; bools are valid."""
    size = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    return (
        data.bitwise_and(1).bool().reshape(shape)
        if dtype is torch.bool
        else data.view(dtype).reshape(shape)
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    left, right = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (a, b))
    return torch.equal(left, right)


def views() -> dict[str, torch.Tensor]:
    base = torch.randn(6, 8)
    deep = torch.randn(2, 3, 4, 5)
    return {
        "whole": base,
        "tie": base,
        "row": base[2],
        "rows": base[1:4],
        "column": base[:, 3],
        "columns": base[:, 2:5],
        "steps": base[::2, ::3],
        "transposed": base.t(),
        "expanded": base[0].expand(4, 8),
        "all_one": base[0, 0].expand(3, 4),
        "diagonal": base.diagonal(),
        "windows": base[0].unfold(0, 3, 1),
        "permuted": deep.permute(3, 1, 0, 2),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "part": deep.permute(2, 0, 3, 1)[1:3, :, ::2],
        "number": torch.tensor(7.5),
        "number_of": base[3, 4],
        "empty": torch.empty(0, 4),
        "empty_view": base[:, 3:3].t(),
        "halves": torch.randn(6, 10).half()[:, 1:].t(),
        "bools": (torch.randn(5, 7) > 0).t(),
        "complex": torch.randn(3, 4, dtype=torch.complex64).t(),
    }
