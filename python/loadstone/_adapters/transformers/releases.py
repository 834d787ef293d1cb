"""Functions whose arguments or results differ between releases from 5.0 on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers.core_model_loading import set_param_for_module
from transformers.modeling_utils import LoadStateDictInfo  # type: ignore[attr-defined]

from loadstone._adapters.sites.transformers import SITES
from loadstone._model.tensor_swap import preserve_identity


def dtype_plan(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    since_51: Any = getattr(model, "_get_dtype_plan", None)
    found: dict[str, torch.dtype] = model.dtype_plan if since_51 is None else since_51(dtype)
    return found


def converted(mapping: Any, first: str, model: Any, quantizer: Any) -> dict[str, Any]:
    made: Any = mapping.convert(first, model=model, config=model.config, hf_quantizer=quantizer)
    return made if SITES.is_since("5.1") else made[0]  # type: ignore[no-any-return]


def empty_info(unexpected: Iterable[str] = ()) -> LoadStateDictInfo:
    since: dict[str, Any] = {"skipped_pp_keys": set()} if SITES.is_since("5.16") else {}
    return LoadStateDictInfo(
        missing_keys=set(),
        unexpected_keys=set(unexpected),
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        **(since if SITES.is_since("5.1") else {"disk_offload_index": None}),
    )


def answer(info: LoadStateDictInfo, index: dict[str, Any] | None) -> Any:
    if SITES.is_since("5.1"):
        return info, index
    info.disk_offload_index = index  # type: ignore[attr-defined]
    return info


def reportable(model: Any, unexpected: set[str]) -> set[str]:
    """Drop the unexpected names that the model or the library ignores."""
    info: Any = empty_info(unexpected)
    if SITES.is_since("5.1"):
        model._adjust_missing_and_unexpected_keys(info)
        left: set[str] = info.unexpected_keys
        return left
    left = model._adjust_missing_and_unexpected_keys(set(), unexpected)[1]
    return left


def put(model: Any, name: str, value: torch.Tensor, info: Any, quantizer: Any) -> None:
    notes: tuple[Any, ...] = (info,)
    if not SITES.is_since("5.1"):
        notes = (info.mismatched_keys, info.missing_keys, info.unexpected_keys)
    of_distributed_loads = () if SITES.is_since("5.16") else (None,)
    set_in_module: Any = set_param_for_module
    arguments = (model, name, value, *notes, *of_distributed_loads, quantizer)
    preserve_identity(model, name, lambda: set_in_module(*arguments))
