"""Load options that the functions of libraries do not have."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from loadstone._base.progress import Progress
from loadstone._base.vocabulary import MaxMemory, Missing, ModelOptMode, ReceiptDigest
from loadstone._files.lora import MergedLoras, open_loras


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """The options of one load, by their public names.

    Attributes:
        missing, progress, threads, receipt: see :func:`loadstone.plan` and
            :meth:`loadstone.Plan.execute`.
        device_map, max_memory, offload_folder: as in :func:`loadstone.plan`, if the library's
            function lacks them.
        loras: adapters to merge into the model; ``None`` under a patch, which merges nothing.
        refuses_unsupported: reject unsupported loads, because the user called loadstone by name.
            False under a patch, which leaves unsupported loads to the library.
        dequantize: loadstone dequantizes a quantized checkpoint; ``None``: only if the library has
            no quantizer for it, or one that cannot work on this machine.
        nested_offset, quantize_experts: see :func:`loadstone.transformers.from_pretrained`.
        infer_config: correct a config that does not fit the file.
        dry_run: end the load before it reads any data, and return its plan.
        mode, attn_implementation: see :func:`loadstone.modelopt.load`.
    """

    missing: Missing = "error"
    progress: Progress = False
    threads: int | None = None
    receipt: ReceiptDigest | None = None
    device_map: Any = None
    max_memory: MaxMemory | None = None
    offload_folder: str | os.PathLike[str] | None = None
    loras: MergedLoras | None = None
    refuses_unsupported: bool = False
    dequantize: bool | None = None
    nested_offset: Mapping[str, float] | None = None
    quantize_experts: bool = False
    infer_config: bool = False
    dry_run: bool = False
    mode: ModelOptMode = "modelopt-compat"
    attn_implementation: Any = None

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> LoadOptions:
        """Return the options among the arguments of a function; open the LoRA adapters."""
        options = {name: arguments[name] for name in NAMES if name in arguments}
        lora, lora_ignore = options.pop("lora", ()), options.pop("lora_ignore", ())
        # Links are followed, as the library follows those of the model.
        merged = open_loras(lora, lora_ignore, allow_links=True, tie=options.pop("tie", "split"))
        return cls(loras=merged, refuses_unsupported=True, **options)


DEFAULTS = LoadOptions()  # the options of a load under a patch

# The options that are keywords of loadstone's functions.
NAMES = sorted(
    {field.name for field in dataclasses.fields(LoadOptions)} - {"loras", "refuses_unsupported"}
    | {"lora", "lora_ignore", "tie"}
)
