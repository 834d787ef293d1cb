"""The input of the library's conversion code, and the recipes derived from it.

Apart from the tracing code, which cached recipes do not need to import.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from loadstone import _core

# Other dtypes are those of codes, indices and masks: part of their meaning.
PLAIN_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass
class ConversionInput:
    """All that recipes depend on, besides the checkpoint.

    Attributes:
        model: a ``PreTrainedModel`` whose parameters may lie on meta.
        dtype: the load's; ``None``: each source's own.
        dtype_plan: patterns of names with a dtype of their own (keep-in-fp32).
        conversions: the library's transforms, those of a quantizer and of a key mapping too.
        quantizer: the library's, or ``None``.
        built_dtype: the dtype that the model was built under, where the load's is another one.
        is_asked: the caller named the dtype, for parameters that were built in another one too.
    """

    model: Any
    dtype: torch.dtype | None
    dtype_plan: dict[str, torch.dtype]
    conversions: list[Any]
    quantizer: Any = None
    built_dtype: torch.dtype | None = None
    is_asked: bool = False

    @property
    def decodes(self) -> bool:
        """Whether quantized tensors of the checkpoint are decoded, unless the model holds codes."""
        return not self.is_quantized_already or self._is_of_bitsandbytes

    def takes_codes(self, target: str) -> bool:
        """Whether the library's quantizer put a module there that takes the components.

        bitsandbytes' replaces linear layers, and leaves experts that the model has in one tensor.
        """
        if not self.is_quantized_already:
            return False
        return bool(self.quantizer.param_needs_quantization(self.model, target))

    @property
    def is_quantized_already(self) -> bool:
        """Whether a quantizer of the library takes care of a checkpoint that is quantized."""
        return self.quantizer is not None and bool(self.quantizer.pre_quantized)

    @property
    def _is_of_bitsandbytes(self) -> bool:
        method = getattr(self.quantizer.quantization_config, "quant_method", "")
        return str(getattr(method, "value", method)) == "bitsandbytes"


@dataclass
class ConversionResult:
    """Recipes, and the keys and targets that have none.

    Attributes:
        recipes: of every target that the checkpoint gives, in the target's final dtype.
        dtypes: these dtypes, by target, by their safetensors names.
        unexpected: (the name that the library reports, the checkpoint's own).
        mismatched: (target, shape found, shape expected).
        used: positions in ``ConversionInput.conversions`` of the transforms that matched something.
        units: for the path of each module whose weight is stored quantized, the tensors of the
            checkpoint that belong to it, by their names inside the module.
        quantized: targets that the load is to quantize.
        decoded: targets that are dequantized beside others which stay quantized.
        unneeded: tensors of the checkpoint that belong to codes, of weights that are dequantized.
        recut: FP8 tensors for which the library derives other blocks than the config has.
        explained: targets without a value, which a finding of their layer names.
        findings: errors: groups that lack a source, conversions that fail or cannot be traced.
    """

    recipes: Any = None
    dtypes: dict[str, str] = field(default_factory=dict)
    unexpected: list[tuple[str, str]] = field(default_factory=list)
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    units: dict[str, dict[str, str]] = field(default_factory=dict)
    quantized: list[str] = field(default_factory=list)
    decoded: list[str] = field(default_factory=list)
    unneeded: list[str] = field(default_factory=list)
    recut: list[str] = field(default_factory=list)
    explained: list[str] = field(default_factory=list)
    findings: list[_core.Finding] = field(default_factory=list)
