"""Check and convert arguments that diffusers would ignore, or reject without naming them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch

from loadstone import _core
from loadstone._base.arguments import wrong_kind
from loadstone._base.dtypes import is_dtype, torch_dtype
from loadstone._base.errors import Error, new_error, unknown_word_error
from loadstone._base.machine import MODES, capacities, device_name
from loadstone._base.names import join_name
from loadstone._model import devices
from loadstone._plan.options import LoadOptions
from loadstone._plan.placement import require_device

# Both names of the same argument; the first is the older one.
_DTYPES = ("torch_dtype", "dtype")


def check(cls: Any, function: str, kwargs: dict[str, Any], options: LoadOptions) -> None:
    """Reject arguments of a direct call that would have no effect or fail without a clear error."""
    expected = f"a model or pipeline class of diffusers with {function}()"
    if isinstance(cls, str) or not callable(getattr(cls, function, None)):
        message = f"this has no function {function}()"
        found = getattr(cls, "__qualname__", repr(cls))
        raise new_error("plan.options", message, field="cls", found=found, expected=expected)
    capacities(options.max_memory, computed=False)
    _check_devices(kwargs.get("device_map"), must_exist=not options.dry_run)
    config = kwargs.get("config")
    if isinstance(config, os.PathLike):
        kwargs["config"] = os.fspath(config)
    elif config is not None and not isinstance(config, str):
        raise wrong_kind("config", config, "a folder, or the name of a repository")
    elif config and not Path(config).exists() and _core.did_you_mean(config, ["infer"]):
        raise unknown_word_error("config", "folder or repository", config, ["infer"])
    if isinstance(subfolder := kwargs.get("subfolder"), int | float):
        raise wrong_kind("subfolder", subfolder, "a folder's name")
    quantization = kwargs.get("quantization_config")
    takes_mapping = function == "from_pretrained" and not is_pipeline(cls)
    is_mapping = isinstance(quantization, Mapping) and not takes_mapping
    if is_mapping or isinstance(quantization, str | type):
        expected = (
            "an object: diffusers.BitsAndBytesConfig(load_in_4bit=True), for a GGUF file "
            "GGUFQuantizationConfig(compute_dtype=torch.bfloat16), or for a pipeline "
            "PipelineQuantizationConfig(...)"
        )
        raise wrong_kind("quantization_config", quantization, expected)


def is_pipeline(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, diffusers.DiffusionPipeline)


def _check_devices(device_map: Any, must_exist: bool, above: str = "") -> None:
    if isinstance(device_map, Mapping):
        for path, device in device_map.items():
            _check_devices(device, must_exist, join_name(above, str(path)))
    elif device_map is not None and device_map not in MODES:
        require_device(device_map, above)
        if must_exist and device_map != "disk":
            devices.require(device_name(device_map))


def check_components(kwargs: Mapping[str, Any], components: Iterable[str]) -> None:
    """Reject a dtype for a component that the pipeline does not have."""
    known = [name for name in components if not name.startswith("_")]
    for field in _DTYPES:
        dtypes = kwargs.get(field)
        for name in dtypes if known and isinstance(dtypes, Mapping) else ():
            if name not in known and name != "default":
                raise unknown_word_error(field, "component", name, [*known, "default"])


def convert_dtypes(kwargs: dict[str, Any], refuses_unsupported: bool) -> None:
    """Convert names of dtypes, for which diffusers would load float32."""
    for field in _DTYPES:
        value = kwargs.get(field)
        if isinstance(value, Mapping):
            kwargs[field] = {
                name: _converted(field, each, refuses_unsupported) for name, each in value.items()
            }
        elif value is not None:
            kwargs[field] = _converted(field, value, refuses_unsupported)


def _converted(field: str, value: Any, refuses_unsupported: bool) -> Any:
    dtype = value
    if isinstance(value, str):
        name = _core.parse_dtype(value)
        dtype = torch_dtype(name) if name is not None and is_dtype(name) else None
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    if refuses_unsupported:
        raise _wrong_dtype(field, value)
    return value


def _wrong_dtype(field: str, value: Any) -> Error:
    return new_error(
        "plan.options",
        "models need a floating-point dtype",
        field=field,
        found=repr(value),
        expected="torch.bfloat16, torch.float16 or torch.float32, or their names",
    )
