"""Hooks on PEFT that choose an adapter's device and check the adapter after the load."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft import PeftModel, peft_model
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import transformers_weight_conversion

from loadstone._adapters.patch import Hook, Hooks, wrap_if_active
from loadstone._adapters.peft.offloaded import bring_weights_for, has_offloaded, offloading_hooks
from loadstone._base.errors import Error, counted, new_error


def hooks() -> Hooks:
    pretrained_model: Any = peft_model.PreTrainedModel  # type: ignore[attr-defined]
    functions: list[tuple[Any, str, Callable[..., Any]]] = [
        (pretrained_model, "_load_pretrained_model", _load_into),
        (BaseTunerLayer, "_get_base_layer_device_and_dtype", _device_and_dtype),
        (BaseTuner, "inject_adapter", _inject),
        (PeftModel, "from_pretrained", _load_peft_model),
        (transformers_weight_conversion, "build_peft_weight_mapping", _weight_mapping),
        (transformers_weight_conversion, "convert_peft_config_for_transformers", _convert_config),
        *((cls, "_replace_module", _replace_module) for cls in _tuner_classes(BaseTuner)),
    ]
    hooks = (Hook(owner, name, wrap_if_active("peft", call)) for owner, name, call in functions)
    return Hooks(hooks, "peft")


def _device_and_dtype(original: Any, layer: Any, base_layer: Any) -> tuple[Any, Any]:
    device, dtype = original(layer, base_layer)
    if device is not None and device.type == "meta":
        device = _execution_device(base_layer) or device
    return device, dtype


def _tuner_classes(cls: Any) -> Iterator[type]:
    if "_replace_module" in vars(cls):
        yield cls
    for subclass in cls.__subclasses__():
        yield from _tuner_classes(subclass)


def _replace_module(
    original: Any, tuner: Any, parent: Any, child_name: str, new_module: Any, child: Any
) -> None:
    """Undo PEFT's move of the new adapter to meta, the device of an offloaded weight."""
    tensors = [
        (registry, name, tensor)
        for module in new_module.modules()
        for registry in (module._parameters, module._buffers)
        for name, tensor in registry.items()
    ]
    original(tuner, parent, child_name, new_module, child)
    for registry, name, tensor in tensors:
        if tensor is not None and not tensor.is_meta and registry[name].is_meta:
            registry[name] = tensor


def _inject(original: Any, tuner: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        result = original(tuner, model, *args, **kwargs)
    except RuntimeError as reason:
        if isinstance(reason, Error) or not has_offloaded(model):
            raise
        raise _unsupported(f"the initialiser needs an offloaded weight: {reason}") from reason
    low_memory = kwargs.get("low_cpu_mem_usage", args[2] if len(args) > 2 else False)
    _require_reachable(model)
    if not low_memory:  # otherwise the adapter is on meta until it is read
        _require_memory(model)
    for _, layer in _adapter_layers(model):
        bring_weights_for(layer)
    return result


def _convert_config(original: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Correct the alpha of joined modules for rsLoRA.

    PEFT multiplies rank and alpha by the number of modules that it joins, but rsLoRA divides alpha
    by the root of the rank.
    """
    before = dict(getattr(config, "alpha_pattern", None) or {})
    original(config, *args, **kwargs)
    if not getattr(config, "use_rslora", False):
        return
    for pattern, alpha in config.alpha_pattern.items():
        if before.get(pattern) != alpha:
            joined = config.rank_pattern[pattern] / config.r
            config.alpha_pattern[pattern] = alpha / math.sqrt(joined)


class _WeightMapping(list[Any]):
    adapter: str = ""


def _weight_mapping(
    original: Any, weight_conversions: Any, adapter_name: str, *args: Any, **kwargs: Any
) -> Any:
    """Add the rule for DoRA magnitudes, which PEFT applies only when it reads files itself.

    Files store magnitudes without ``.weight``, so transformers would initialise them instead.
    """
    mapping = _WeightMapping(original(weight_conversions, adapter_name, *args, **kwargs))
    mapping.adapter = adapter_name
    name = f"lora_magnitude_vector.{adapter_name}"
    if mapping:
        renaming: Any = transformers_weight_conversion.WeightRenaming  # type: ignore[attr-defined]
        mapping.append(renaming(f"{re.escape(name)}$", f"{name}.weight"))
    return mapping


def _load_into(
    original: Any, model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, **rest: Any
) -> Any:
    """Read an adapter to the devices on which its layers run, instead of the offload device."""
    devices = load_config.device_map
    layers = dict(_adapter_layers(model)) if devices is not None else {}
    if layers:
        device_map = {
            path: "cpu" if device == "disk" else device for path, device in devices.items()
        }
        for path, layer in layers.items():
            device = _execution_device(layer.get_base_layer())
            if device is not None:
                device_map[path] = device
        load_config = dataclasses.replace(load_config, device_map=device_map)
    result = original(model, state_dict, checkpoint_files, load_config, **rest)
    if layers:
        _require_memory(model)
    _require_read(result[0], getattr(load_config.weight_mapping, "adapter", ""))
    return result


def _require_read(info: Any, adapter: str) -> None:
    """Reject an adapter with missing tensors if its file has unused tensors.

    transformers only reports both kinds, and leaves the missing tensors as initialised.
    """
    missing = [name for name in sorted(info.missing_keys) if adapter in name.split(".")]
    unused = sorted(info.unexpected_keys)
    if adapter and missing and unused:
        raise new_error(
            "plan.missing",
            f"the adapter's file has no value for it under a known name, but "
            f"{counted(len(unused), 'tensor', 'tensors')} without a use",
            tensor=missing[0],
            found=", ".join(unused[:4]),
            expected=", ".join(missing[:4]),
        )


def _load_peft_model(original: Any, cls: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Explain an error of PEFT, which removes all hooks and cannot dispatch from disk again."""
    try:
        return original(cls, model, *args, **kwargs)
    except NotImplementedError as reason:
        if "disk" not in (getattr(model, "hf_device_map", None) or {}).values():
            raise
        raise new_error(
            "plan.options",
            "PeftModel cannot load tensors that are offloaded to disk; call the "
            "model's own load_adapter()",
            field="adapter",
        ) from reason


def _adapter_layers(model: Any) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield path, module


def _execution_device(module: Any) -> torch.device | None:
    for hook in offloading_hooks(module):
        if hook.execution_device is not None:
            return torch.empty(0, device=hook.execution_device).device
    return None


def _require_reachable(model: Any) -> None:
    """Reject hooks on outer modules: they would look up the adapter among offloaded values."""
    outer_paths = [
        path
        for path, module in model.named_modules()
        if any(hook.place_submodules for hook in offloading_hooks(module))
    ]
    for path, _ in _adapter_layers(model):
        for outer in outer_paths:
            if not outer or path.startswith(f"{outer}."):
                raise _unsupported(
                    "the layer is offloaded by a hook on a module around it "
                    "(preload_module_classes), which cannot load the adapter",
                    path,
                    outer,
                )


def _require_memory(model: Any) -> None:
    """Reject adapter tensors on meta if hooks run the model."""
    if not has_offloaded(model):
        return  # the caller wants the model on meta
    for path, layer in _adapter_layers(model):
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if tensor.is_meta and not name.startswith("base_layer."):
                raise _unsupported(
                    "the adapter's tensor is on meta, where it has no value: PEFT makes it from "
                    "the weight of the layer, or on its device, and the weight is offloaded",
                    f"{path}.{name}",
                    "meta",
                )


def _unsupported(message: str, tensor: str = "", found: str = "") -> Exception:
    return new_error(
        "plan.options",
        f"{message}; load the model without offloading this layer",
        field="adapter",
        tensor=tensor,
        found=found,
    )
