"""Functions whose arguments or results differ between releases from 5.0 on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers.modeling_utils import LoadStateDictInfo  # type: ignore[attr-defined]

from loadstone._adapters.sites.transformers import SITES


def dtype_plan(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    plan: dict[str, torch.dtype]
    plan = model._get_dtype_plan(dtype) if SITES.is_since("5.1") else model.dtype_plan
    return plan


def convert(mapping: Any, first: str, model: Any, quantizer: Any) -> Any:
    result = mapping.convert(first, model=model, config=model.config, hf_quantizer=quantizer)
    return result if SITES.is_since("5.1") else result[0]


def empty_info(unexpected: Iterable[str] = ()) -> LoadStateDictInfo:
    fields: dict[str, Any] = {}
    if SITES.is_since("5.16"):
        fields["skipped_pp_keys"] = set()
    elif not SITES.is_since("5.1"):
        fields["disk_offload_index"] = None
    return LoadStateDictInfo(
        missing_keys=set(),
        unexpected_keys=set(unexpected),
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        **fields,
    )


def loading_info(info: LoadStateDictInfo, index: dict[str, Any] | None) -> Any:
    if SITES.is_since("5.1"):
        return info, index
    info.disk_offload_index = index  # type: ignore[attr-defined]
    return info


def reportable(model: Any, unexpected: set[str]) -> set[str]:
    """Drop the unexpected names that the model or the library ignores."""
    reported: set[str]
    if SITES.is_since("5.1"):
        info: Any = empty_info(unexpected)
        model._adjust_missing_and_unexpected_keys(info)
        reported = info.unexpected_keys
    else:
        reported = model._adjust_missing_and_unexpected_keys(set(), unexpected)[1]
    return reported
