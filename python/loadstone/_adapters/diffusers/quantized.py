"""Weights that bitsandbytes quantizes in models of the library.

The library's own code builds the layers. Its quantizers refuse machines without a GPU and places on
cpu and disk, where loadstone can quantize.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from loadstone._adapters.patch import suspended
from loadstone._base.errors import make
from loadstone._files.catalog import Catalog

if TYPE_CHECKING:
    from loadstone._adapters.bitsandbytes.loading import QuantizedWeights

_METHOD = "bitsandbytes"


class QuantizerHooks:
    """The hooks on the library's quantizers of bitsandbytes.

    Args:
        is_ours: whether a load of loadstone's is under way.
    """

    def __init__(self, is_ours: Callable[[], bool]) -> None:
        self.is_ours = is_ours

    def places(self) -> list[tuple[Any, str, Any]]:
        """Owner, name and replacement."""
        from diffusers.quantizers.bitsandbytes import bnb_quantizer

        replacements: dict[str, Any] = {
            "validate_environment": self._validate_environment,
            "update_device_map": self._update_device_map,
            "adjust_target_dtype": self._adjust_target_dtype,
            "adjust_max_memory": self._adjust_max_memory,
            "_process_model_before_weight_loading": self._replace_layers,
        }
        owners = (
            bnb_quantizer.BnB4BitDiffusersQuantizer,
            bnb_quantizer.BnB8BitDiffusersQuantizer,
        )
        return [(owner, name, each) for owner in owners for name, each in replacements.items()]

    def _validate_environment(
        self, original: Any, quantizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Allows machines without a GPU, and cpu and disk in device maps."""
        if not self.is_ours():
            original(quantizer, *args, **kwargs)
        elif _has_accelerator():
            kwargs.pop("device_map", None)
            original(quantizer, *args, **kwargs)
        else:
            importlib.import_module(_METHOD)  # the only other requirement of the original

    def _update_device_map(self, original: Any, quantizer: Any, device_map: Any) -> Any:
        """No map without an accelerator: the library would ask CUDA for the device."""
        if device_map is None and self.is_ours() and not _has_accelerator():
            return None
        return original(quantizer, device_map)

    def _adjust_target_dtype(self, original: Any, quantizer: Any, dtype: Any) -> Any:
        """The dtype given: the library counts all tensors as quantized; see :func:`sized`."""
        return dtype if self.is_ours() else original(quantizer, dtype)

    def _adjust_max_memory(self, original: Any, quantizer: Any, max_memory: Any) -> Any:
        """The memory given; the library's own reserves some for quantizing on a device."""
        return max_memory if self.is_ours() else original(quantizer, max_memory)

    def _replace_layers(
        self, original: Any, quantizer: Any, model: Any, device_map: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Hides the device map, as the library refuses quantized modules on cpu and disk."""
        stays = quantizer.quantization_config.llm_int8_enable_fp32_cpu_offload
        places = None if self.is_ours() and not stays else device_map
        return original(quantizer, model, places, *args, **kwargs)


def _has_accelerator() -> bool:
    return any(each.is_available() for each in (torch.cuda, torch.xpu, torch.mps))


def is_bitsandbytes(quantizer: Any) -> bool:
    """Whether the library quantizes by bitsandbytes; also asked of a quantization config."""
    config = getattr(quantizer, "quantization_config", quantizer)
    return str(getattr(getattr(config, "quant_method", None), "value", "")) == _METHOD


def is_known(quantizer: Any) -> bool:
    """Whether loadstone supports a quantizer of the library."""
    if not is_bitsandbytes(quantizer):
        return False
    return not getattr(quantizer.quantization_config, "llm_int8_has_fp16_weight", False)


def hand_on(quantizer: Any, device_map: Any, is_direct: bool) -> None:
    """Makes up for the library's own checks, before the library quantizes by itself.

    Raises:
        Error: ``plan.options``: loadstone was called by name.
    """
    if not is_bitsandbytes(quantizer):
        return
    if is_direct:
        kept = getattr(quantizer.quantization_config, "llm_int8_has_fp16_weight", False)
        raise make(
            "plan.options",
            "this load is not supported: call the class's own from_pretrained",
            field="quantization_config",
            found="llm_int8_has_fp16_weight" if kept else "files that are not safetensors",
        )
    with suspended("diffusers"):
        quantizer.validate_environment(device_map=device_map)


def quantized_weights_of(
    model: Any, catalog: Catalog, converted: Mapping[str, Any]
) -> QuantizedWeights | None:
    """The weights of layers that the library's quantizer has put into a model.

    Args:
        converted: the checkpoint's tensors by the model's names.

    Returns:
        ``None`` if there are none.
    """
    paths = _quantizing(model).keys()
    if not paths:
        return None
    from loadstone._adapters.bitsandbytes.form import full
    from loadstone._adapters.bitsandbytes.loading import QuantizedWeights, quantizations
    from loadstone._adapters.bitsandbytes.stored import groups_by_path, read

    found = read(catalog, groups_by_path(catalog, paths))
    taken = {unit.name for unit in found.units.values()} | found.broken.keys()
    names = [full(path, "weight") for path in paths]
    free = [name for name in names if name in converted and name not in taken]
    units = QuantizedWeights(catalog, found.units, quantizations(model, free), found.broken)
    units.findings = [*found.findings, *units.misfits(model), *units.unfilled(model)]
    return units


def _quantizing(model: Any) -> dict[str, Any]:
    """The layers of bitsandbytes in a model; nothing is imported if there are none."""
    classes = {type(module) for module in model.modules()}
    bases = (base.__module__ for cls in classes for base in cls.__mro__)
    if not any(base.startswith(f"{_METHOD}.") for base in bases):
        return {}
    from loadstone._adapters.bitsandbytes.choosing import _is_quantizing

    return {path: module for path, module in model.named_modules() if _is_quantizing(module)}


def parts_of(units: QuantizedWeights | None, names: Mapping[str, Any]) -> set[str]:
    """Names of tensors that are components of quantized weights."""
    if units is None:
        return set()
    weights = {unit.name for unit in units.stored.values()} | units.broken.keys()
    found = set()
    for name in names:
        path, _, leaf = name.rpartition(".")
        weight = f"{path}.weight" if path else "weight"
        is_beside = leaf in ("SCB", "weight_format") and weight in weights
        if name in weights or is_beside or _above(name) in weights:
            found.add(name)
    return found


def _above(name: str) -> str:
    """The weight that a component belongs to, by its name."""
    path, dot, _ = name.rpartition(".weight.")
    return f"{path}.weight" if dot else "weight" if name.startswith("weight.") else ""


@contextlib.contextmanager
def sized(model: torch.nn.Module) -> Iterator[None]:
    """Gives weights on meta the sizes of their quantized bytes, for accelerate's counting."""
    layers = _quantizing(model)
    held = {path: layer._parameters["weight"] for path, layer in layers.items()}
    sizes = {path: _size(model, f"{path}.weight" if path else "weight") for path in layers}
    try:
        for path, layer in layers.items():
            blank = torch.empty(sizes[path], dtype=torch.uint8, device="meta")
            layer._parameters["weight"] = torch.nn.Parameter(blank, requires_grad=False)
        yield
    finally:
        for path, layer in layers.items():
            layer._parameters["weight"] = held[path]


def _size(model: torch.nn.Module, name: str) -> int:
    from loadstone._adapters.bitsandbytes.loading import quantized_bytes

    return quantized_bytes(model, name)
