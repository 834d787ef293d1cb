"""How a tensor is quantized, as plans are told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Quantization:
    """How a tensor is quantized; see ``docs/formats/bitsandbytes.md`` and ``modelopt.md`` there.

    Attributes:
        encoding: ``"nf4"``, ``"fp8"``, ``"nvfp4"`` ...
        dialect: whose bytes; ``""``: the encoding's first.
        block_size: elements with one scale (nf4, fp4).
        nested: whether the scales are quantized too (nf4, fp4).
        nested_offset: ``None``: the mean of the scales.
        group: targets with the same one, if it is not empty, share the largest magnitude that
            fp8 and nvfp4 make a scale of.
    """

    encoding: str
    dialect: str = ""
    block_size: int = 64
    nested: bool = False
    nested_offset: float | None = None
    group: str = ""
