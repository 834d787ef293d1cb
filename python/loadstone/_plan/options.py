"""Options of loads that the functions of libraries do not have."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loadstone._base.errors import unknown
from loadstone._files.weighted import MergedAdapters, Weighted, adapters

Missing = str | Mapping[str, str]
Progress = bool | Callable[[int, int], object]


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """The options of one load, by their public names.

    Attributes:
        missing, progress, threads, receipt: see :func:`loadstone.plan` and
            :meth:`loadstone.Plan.execute`.
        device_map, max_memory, offload_folder: as :func:`loadstone.plan` takes them, where the
            library's function has none of its own.
        adapters: what is merged into the model; ``None`` under a patch, which merges nothing.
        refuses_unsupported: loadstone was called by name, so it refuses unsupported loads; under a
            patch they are left to the library.
        dequantize: whether a quantized checkpoint is dequantized by loadstone; ``None``: where the
            library has no quantizer for it, or one that cannot work here.
        nested_offset, quantize_experts: see :func:`loadstone.transformers.from_pretrained`.
        infer_config: a config that does not fit the file is corrected.
        mode, attn_implementation: see :func:`loadstone.modelopt.load`.
    """

    missing: Missing = "error"
    progress: Progress = False
    threads: int | None = None
    receipt: str | None = None
    device_map: Any = None
    max_memory: Mapping[Any, int | str] | None = None
    offload_folder: str | os.PathLike[str] | None = None
    adapters: MergedAdapters | None = None
    refuses_unsupported: bool = False
    dequantize: bool | None = None
    nested_offset: Mapping[str, float] | None = None
    quantize_experts: bool = False
    infer_config: bool = False
    mode: str = "modelopt-compat"
    attn_implementation: Any = None

    @classmethod
    def of_call(
        cls,
        *,
        lora: Weighted = (),
        lora_ignore: str | Sequence[str] = (),
        tie: str = "split",
        **named: Any,
    ) -> LoadOptions:
        """Return the options that a caller of loadstone names; opens the adapters.

        Raises:
            Error: ``plan.options``: no load has such an option; the nearest one is named.
        """
        for name in named:
            if name not in NAMES:
                raise unknown(name, "option", name, NAMES)
        merged = adapters(lora, lora_ignore, tie=tie)
        return cls(adapters=merged, refuses_unsupported=True, **named)


DEFAULTS = LoadOptions()  # under a patch

# The keywords of loadstone's functions.
NAMES = sorted(
    {each.name for each in dataclasses.fields(LoadOptions)} - {"adapters", "refuses_unsupported"}
    | {"lora", "lora_ignore", "tie"}
)
