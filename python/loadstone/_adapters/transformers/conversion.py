"""Define the input and the result of the library's conversion code."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from loadstone import _core

# Dtypes that a load may change. Other dtypes belong to codes, indices and masks.
PLAIN_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass
class ConversionInput:
    """Everything that recipes depend on, besides the checkpoint.

    Attributes:
        model: a ``PreTrainedModel`` whose parameters may be on meta.
        dtype: the dtype of the load; ``None`` keeps the dtype of each source.
        dtype_plan: dtypes by name pattern, such as those of keep-in-fp32.
        conversions: the library's transforms, including the quantizer's and the key mapping's.
        built_dtype: the dtype of the model's construction, if it differs from the load's.
        is_asked: the caller chose the dtype, also for parameters built in a different dtype.
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
        if not self.is_quantized_already:
            return True
        return getattr(self.quantizer.quantization_config, "quant_method", "") == "bitsandbytes"

    def takes_codes(self, target: str) -> bool:
        """Return whether a target takes codes.

        Experts that share one tensor do not, because bitsandbytes replaces only linear layers.
        """
        if not self.is_quantized_already:
            return False
        return bool(self.quantizer.param_needs_quantization(self.model, target))

    @property
    def is_quantized_already(self) -> bool:
        return self.quantizer is not None and bool(self.quantizer.pre_quantized)


@dataclass
class ConversionResult:
    """Recipes, and the keys and targets without a recipe.

    Attributes:
        recipes: one for each target in the checkpoint, in the target's final dtype.
        dtypes: safetensors names of the final dtypes, by target.
        unexpected: pairs (the name that the library reports, the name in the checkpoint).
        mismatched: tuples (target, shape found, shape expected).
        used: indices in ``ConversionInput.conversions`` of the transforms that matched.
        stored_weights: the checkpoint tensors of quantized weights, by module path and by name in
            the module.
        quantized: targets that the load quantizes.
        decoded: targets that the load dequantizes, although it leaves others quantized.
        unneeded: tensors that only codes need, such as activation scales.
        recut: FP8 tensors for which the library derives different blocks than the config has.
        explained: targets without a value that a finding about their layer already reports.
        findings: errors: groups without a source, conversions that fail or cannot be traced.
    """

    recipes: Any = None
    dtypes: dict[str, str] = field(default_factory=dict)
    unexpected: list[tuple[str, str]] = field(default_factory=list)
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    stored_weights: dict[str, dict[str, str]] = field(default_factory=dict)
    quantized: list[str] = field(default_factory=list)
    decoded: list[str] = field(default_factory=list)
    unneeded: list[str] = field(default_factory=list)
    recut: list[str] = field(default_factory=list)
    explained: list[str] = field(default_factory=list)
    findings: list[_core.Finding] = field(default_factory=list)
