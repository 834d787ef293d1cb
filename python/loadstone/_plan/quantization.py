"""The quantization of a tensor in a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Quantization:
    """The quantization of one tensor; see ``docs/formats/bitsandbytes.md`` and ``modelopt.md``.

    Attributes:
        encoding: ``"nf4"``, ``"fp8"``, ``"nvfp4"`` ...
        dialect: the implementation whose bytes are written; ``""``: the encoding's default.
        block_size: number of elements that share a scale (nf4, fp4).
        nested: whether the scales are quantized too (nf4, fp4).
        nested_offset: subtracted from the scales before they are quantized; ``None``: their mean.
        group: targets of the same non-empty group share the largest magnitude, from which fp8 and
            nvfp4 compute a scale.
    """

    encoding: str
    dialect: str = ""
    block_size: int = 64
    nested: bool = False
    nested_offset: float | None = None
    group: str = ""
