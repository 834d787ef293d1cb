"""Hooks on diffusers' bitsandbytes quantizers, and the weights that they quantize.

diffusers builds the layers, but rejects CPU-only machines and quantized modules on the CPU or on
disk. loadstone supports both.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from diffusers.quantizers import auto

from loadstone._adapters.patch import suspended
from loadstone._base.adapters import quantized_layers_of
from loadstone._base.errors import new_error
from loadstone._base.names import join_name
from loadstone._files.catalog import Catalog

_METHOD = "bitsandbytes"

# Matches the name of a quantized weight's component; the group is the prefix of the weight's name.
_COMPONENT = re.compile(r"((?:.*\.)?)(?:SCB|weight_format|weight\..*)")


def replacements() -> list[tuple[Any, str, Any]]:
    from diffusers.quantizers.bitsandbytes import bnb_quantizer

    methods: dict[str, Any] = {
        "validate_environment": _validate_environment,
        "update_device_map": _update_device_map,
        "adjust_target_dtype": _keep_argument,
        "adjust_max_memory": _keep_argument,
        "_process_model_before_weight_loading": _replace_layers,
    }
    owners = (bnb_quantizer.BnB4BitDiffusersQuantizer, bnb_quantizer.BnB8BitDiffusersQuantizer)
    return [(owner, name, method) for owner in owners for name, method in methods.items()]


def _validate_environment(_: Any, original: Any, quantizer: Any, *args: Any, **kwargs: Any) -> None:
    """Allow CPU-only machines, and the CPU and the disk in device maps."""
    if _has_accelerator():
        kwargs.pop("device_map", None)
        original(quantizer, *args, **kwargs)
    else:
        importlib.import_module(_METHOD)  # the only other requirement of the original


def _update_device_map(_: Any, original: Any, quantizer: Any, device_map: Any) -> Any:
    """Return ``None`` without an accelerator, because diffusers would query CUDA."""
    if device_map is None and not _has_accelerator():
        return None
    return original(quantizer, device_map)


def _keep_argument(_: Any, original: Any, quantizer: Any, argument: Any) -> Any:
    """Return the argument, a dtype or a memory limit, unchanged.

    diffusers would change it, because diffusers treats all tensors as quantized (see
    :func:`quantized_sizes`) and reserves memory for quantizing on the device.
    """
    return argument


def _replace_layers(
    _: Any, original: Any, quantizer: Any, model: Any, device_map: Any, *args: Any, **kwargs: Any
) -> Any:
    """Hide the device map, because diffusers rejects quantized modules on the CPU and on disk."""
    keeps_float32 = quantizer.quantization_config.llm_int8_enable_fp32_cpu_offload
    return original(quantizer, model, device_map if keeps_float32 else None, *args, **kwargs)


def _has_accelerator() -> bool:
    return any(backend.is_available() for backend in (torch.cuda, torch.xpu, torch.mps))


def is_bitsandbytes(quantizer: Any) -> bool:
    """Return whether a quantizer or a quantization config is for bitsandbytes."""
    config = getattr(quantizer, "quantization_config", quantizer)
    return str(getattr(getattr(config, "quant_method", None), "value", "")) == _METHOD


def strip_config(config: dict[str, Any], is_single_file: bool) -> Exception | None:
    """Remove a ``quantization_config`` that does not hold for the model of this load.

    The config of a quantized folder does not hold for a single file. diffusers cannot read the
    configs of some folders, which loadstone dequantizes; the result is diffusers' error.
    """
    stored = config.get("quantization_config")
    if stored is None:
        return None
    reason = None
    if not is_single_file:
        try:
            auto.DiffusersAutoQuantizer.from_dict(dict(stored))
        except (TypeError, ValueError) as error:
            reason = error
    if is_single_file or reason is not None:
        del config["quantization_config"]
    return reason


def is_known(quantizer: Any) -> bool:
    return is_bitsandbytes(quantizer) and not _keeps_float16(quantizer)


def _keeps_float16(quantizer: Any) -> bool:
    return getattr(quantizer.quantization_config, "llm_int8_has_fp16_weight", False)


def check_for_library(quantizer: Any, device_map: Any, refuses_unsupported: bool) -> None:
    """Run the checks that the hooks skip, before diffusers quantizes on its own.

    Raises:
        OptionError: ``plan.options``, if the caller called loadstone explicitly.
    """
    if not is_bitsandbytes(quantizer):
        return
    if refuses_unsupported:
        raise new_error(
            "plan.options",
            "this load is not supported: call the class's own from_pretrained",
            field="quantization_config",
            found="llm_int8_has_fp16_weight"
            if _keeps_float16(quantizer)
            else "files that are not safetensors",
        )
    with suspended("diffusers"):
        quantizer.validate_environment(device_map=device_map)


@contextlib.contextmanager
def quantized_sizes(model: torch.nn.Module) -> Iterator[None]:
    """Give weights on meta their quantized sizes, from which accelerate computes device maps."""
    layers: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for library in quantized_layers_of(model):
        library_layers = _quantizing_layers(library, model)
        layers |= library_layers
        sizes |= {
            path: library.quantized_bytes(model, join_name(path, "weight"))
            for path in library_layers
        }
    weights = {path: layer._parameters["weight"] for path, layer in layers.items()}
    try:
        for path, layer in layers.items():
            blank = torch.empty(sizes[path], dtype=torch.uint8, device="meta")
            layer._parameters["weight"] = torch.nn.Parameter(blank, requires_grad=False)
        yield
    finally:
        for path, layer in layers.items():
            layer._parameters["weight"] = weights[path]


# --- quantized weights ---------------------------------------------------------------------------


def quantized_weights(model: Any, catalog: Catalog, converted: Mapping[str, Any]) -> list[Any]:
    """Return ``QuantizedWeights`` for each library that has quantizing layers in a model."""
    weights = []
    for library in quantized_layers_of(model):
        paths = _quantizing_layers(library, model)
        names = [name for path in paths if (name := join_name(path, "weight")) in converted]
        if paths:
            weights.append(library.traced_weights(model, catalog, list(paths), names))
    return weights


def has_quantizing_layers(model: torch.nn.Module) -> bool:
    return any(_quantizing_layers(library, model) for library in quantized_layers_of(model))


def _quantizing_layers(library: Any, model: torch.nn.Module) -> dict[str, Any]:
    return {path: layer for path, layer in model.named_modules() if library.is_quantizing(layer)}


def component_names(weights: Iterable[Any], names: Iterable[str]) -> set[str]:
    """Return the names of tensors that are components of quantized weights."""
    quantized: set[str] = set()
    for library in weights:
        quantized |= {stored.name for stored in library.stored.values()} | library.broken.keys()
    components = ((name, _COMPONENT.fullmatch(name)) for name in names)
    return {
        name
        for name, match in components
        if name in quantized or (match is not None and f"{match[1]}weight" in quantized)
    }
