"""Hooks on ``from_pretrained`` of the library.

They replace the context in which the model is built (by a skeleton: buffers stay real), the reading
of the checkpoint, and the step that allocates missing tensors (the library's own overwrites every
non-persistent buffer with uninitialized memory). All else is the library's code: arguments,
configs, quantizers, device maps, initialisers, ties, generation configs, hooks, adapters.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from loadstone._adapters.patch import Hook, Hooks, gated, held, suspended
from loadstone._adapters.sites import is_known, sites_of
from loadstone._adapters.sites.transformers import SITES
from loadstone._adapters.transformers import IS_V5, quantized, stripped_config, trainer, v4
from loadstone._adapters.transformers.call import (
    CURRENT,
    constructing_in,
    current,
    reason_against,
    refused,
)
from loadstone._adapters.transformers.from_pretrained_call import (
    DEFAULTS,
    FromPretrainedCall,
)
from loadstone._base.dtypes import torch_dtype
from loadstone._base.torch_modes import construct, constructing, in_turn, ordinary_tensors
from loadstone._files.catalog import readable
from loadstone._plan.options import LoadOptions
from loadstone._plan.placement import expanded
from loadstone._skeleton.skeleton import skeleton
from loadstone.peft import with_adapters

OPTIONS = ContextVar("loadstone_transformers_options", default=DEFAULTS)

# False while the library constructs a model in this thread.
_TIES = ContextVar("loadstone_transformers_ties", default=True)

# Arguments that ask for another way of loading altogether.
_OTHER_WAYS = ("state_dict", "gguf_file")
# So do these, but for releases that make DTensors of them; it shows when the model is there.
_OF_RANKS = ("tp_plan", "tp_size", "distributed_config", "device_mesh")


@functools.cache
def hooks() -> Hooks:
    """The functions of the library that are replaced while a load runs on loadstone."""
    from transformers import PreTrainedModel, modeling_utils
    from transformers.integrations.peft import PeftAdapterMixin

    places: list[tuple[Any, str, Any]] = [
        (PreTrainedModel, "from_pretrained", _from_pretrained),
        (PreTrainedModel, "_initialize_missing_keys", _initialize_missing_keys),
        (modeling_utils, "_get_device_map", _get_device_map),
        *((PeftAdapterMixin, name, _with_adapters) for name in ("load_adapter", "add_adapter")),
        *(_middle() if IS_V5 else v4.middle()),
    ]
    turns = [
        Hook(PreTrainedModel, "get_init_context", in_turn(_one_context)),
        Hook(PreTrainedModel, "_from_config", in_turn(construct)),
    ]
    found = [Hook(owner, name, gated("transformers", each)) for owner, name, each in places]
    if not IS_V5:
        return Hooks(found + turns, "transformers")
    from loadstone._adapters.transformers import conversions

    ties = _ties() if SITES.is_since("5.1") else []
    return Hooks(found + turns + ties + conversions.hooks(), "transformers", trainer.hooks)


def _middle() -> list[tuple[Any, str, Any]]:
    """The replaced functions of releases from 5.0 on."""
    from transformers import PreTrainedModel, modeling_utils
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
    from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer

    loading = _load_pretrained_model if SITES.is_since("5.1") else _load_by_class
    return [
        (PreTrainedModel, "get_init_context", _get_init_context),
        (PreTrainedModel, "init_weights", _init_weights),
        (PreTrainedModel, "_load_pretrained_model", loading),
        (PreTrainedModel, "_move_missing_keys_from_meta_to_device", _move_missing_keys),
        (modeling_utils, "get_hf_quantizer", _get_hf_quantizer),
        (modeling_utils, "_get_dtype", _get_dtype),
        *(
            (quantizer, name, each)
            for quantizer in (Bnb4BitHfQuantizer, Bnb8BitHfQuantizer)
            for name, each in _OF_QUANTIZERS.items()
        ),
    ]


def _ties() -> list[Hook]:
    """Hooks by which a construction suspends ties in its own thread, and not in all."""
    from transformers import PreTrainedModel, initialization

    return [
        Hook(initialization, "no_tie_weights", lambda original: _no_ties),
        Hook(PreTrainedModel, "tie_weights", in_turn(_tie_weights)),
    ]


@contextlib.contextmanager
def _no_ties() -> Iterator[None]:
    with held(_TIES, False):
        yield


def _tie_weights(original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs) if _TIES.get() else None


def _begun(chosen: LoadOptions) -> FromPretrainedCall:
    """A new call of ``from_pretrained``, for the installed release."""
    if not IS_V5:
        return v4.Load(chosen)
    from loadstone._adapters.transformers.load import Load

    return Load(chosen)


def _makes_dtensors() -> bool:
    """Whether the release spreads a model over ranks before it is loaded, as DTensors."""
    if not IS_V5:
        return False
    from transformers import core_model_loading

    return hasattr(core_model_loading, "DtensorShardOperation")


def _from_pretrained(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    chosen = OPTIONS.get()
    ways = _OTHER_WAYS if _makes_dtensors() else (*_OTHER_WAYS, *_OF_RANKS)
    other = [name for name in ways if kwargs.get(name) is not None]
    if _is_sharded_by_others():
        other.append("DeepSpeed or FSDP")
    places = _places(kwargs.get("device_map"))
    if "meta" in places and len(places) > 1:
        other.append("device_map (meta beside other devices)")
    hooks().refresh()
    if other and chosen.is_direct:
        raise refused(other[0])
    if other or places == {"meta"}:  # the caller wants the model on meta
        with suspended("transformers"):
            return original(cls, *args, **kwargs)
    with ordinary_tensors(), held(CURRENT, _begun(chosen)) as load:
        result = original(cls, *args, **kwargs)
        load.finish(result[0] if isinstance(result, tuple) else result)
    return result


def _get_init_context(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    contexts = original(cls, *args, **kwargs)
    load = current()
    if load is None or not any(isinstance(each, torch.device) for each in contexts):
        return contexts
    ours = [skeleton() if isinstance(each, torch.device) else each for each in contexts]
    return [*ours, constructing_in(load)]


def _one_context(original: Any, *args: Any, **kwargs: Any) -> Any:
    """All contexts as one: the library leaves none of them when a later one raises."""
    return [_entered_in_turn(original(*args, **kwargs))]


@contextlib.contextmanager
def _entered_in_turn(contexts: Sequence[Any]) -> Iterator[None]:
    """All contexts of a construction: left whatever happens, and in one thread at a time.

    The library sets torch's default dtype for the whole process.
    """
    with constructing(), contextlib.ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


def _get_hf_quantizer(
    original: Any, config: Any, quantization_config: Any, *args: Any, **kwargs: Any
) -> Any:
    """None where codecs dequantize the checkpoint, of which the model knows nothing then."""
    load = current()
    if load is None:
        return original(config, quantization_config, *args, **kwargs)
    wish = load.options.dequantize
    result, load.stripped_config = stripped_config.chosen(
        original, wish, config, quantization_config, *args, **kwargs
    )
    return result


def _get_dtype(
    original: Any, dtype: Any, checkpoint_files: Any, config: Any, *args: Any, **kwargs: Any
) -> Any:
    """The dtype of numbers: where the config has none the library takes that of the codes."""
    load = current()
    is_asked = dtype == "auto" and getattr(config, "dtype", None) is None
    if load is not None and load.stripped_config.method and is_asked and checkpoint_files:
        catalog, _ = readable(checkpoint_files, allow_links=True)
        if catalog is not None and quantized.is_decodable(catalog):
            dtype = torch_dtype(quantized.dtype_of_numbers(catalog))
    return original(dtype, checkpoint_files, config, *args, **kwargs)


def _get_device_map(original: Any, model: Any, device_map: Any, *args: Any, **kwargs: Any) -> Any:
    """Maps with paths inside one another, as accelerate can dispatch them."""
    found = original(model, device_map, *args, **kwargs)
    is_ours = current() is not None and not isinstance(device_map, str)
    return expanded(model, found) if is_ours and found is not None else found


def _validate_environment(original: Any, quantizer: Any, *args: Any, **kwargs: Any) -> None:
    """Allows cpu and disk in device maps, which the library refuses; weights stay quantized."""
    if current() is not None:
        kwargs.pop("device_map", None)
    original(quantizer, *args, **kwargs)


def _adjust_max_memory(original: Any, quantizer: Any, max_memory: Any) -> Any:
    """The memory given; the library's own reserves some for quantizing on a device."""
    return max_memory if current() is not None else original(quantizer, max_memory)


def _param_element_size(
    original: Any, quantizer: Any, model: Any, name: str, parameter: torch.Tensor
) -> float:
    """Bytes per element with the scales, which the library does not count."""
    size: float = original(quantizer, model, name, parameter)
    if current() is None or not quantizer.param_needs_quantization(model, name):
        return size
    from loadstone._adapters.bitsandbytes.loading import quantized_bytes

    return quantized_bytes(model, name) / max(int(parameter.numel()), 1)


_OF_QUANTIZERS = {
    "validate_environment": _validate_environment,
    "adjust_max_memory": _adjust_max_memory,
    "param_element_size": _param_element_size,
}


def _init_weights(original: Any, model: Any) -> Any:
    """Skipped during construction: the library asks the default device, which is not meta here."""
    load = current()
    return None if load is not None and load.is_constructing else original(model)


def _load_pretrained_model(
    original: Any,
    model: Any,
    state_dict: Any,
    checkpoint_files: list[str] | None,
    load_config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    load: Any = current()
    if load is not None and load.model is None:  # else an adapter for a model that is loaded
        mesh = load_config.device_mesh
        reason = reason_against(model, state_dict, checkpoint_files, mesh)
        if reason is None and load_config.hf_quantizer is not None:
            reason = _reason_against_quantizer(load_config, checkpoint_files)
        if reason is None and checkpoint_files is not None:
            return load.read(model, checkpoint_files, load_config)
        if load.options.is_direct:
            raise refused(reason or "no files")
        load.initialises_missing = load_config.hf_quantizer is None and mesh is None
    return original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)


def _load_by_class(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    return _load_pretrained_model(functools.partial(original, cls), *args, **kwargs)


def _with_adapters(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Proves the model before the adapter is added, which renames its tensors."""
    load = current()
    if load is not None and load.model is model:
        load.finish(model)
    return with_adapters(original, model, *args, **kwargs)


def _move_missing_keys(
    original: Any, model: Any, missing_keys: Any, device_map: Any, *args: Any, **kwargs: Any
) -> Any:
    load: Any = current()
    if load is None or not load.initialises_missing:
        return original(model, missing_keys, device_map, *args, **kwargs)
    return load.give_memory(model, set(missing_keys), device_map)


def _initialize_missing_keys(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(model, *args, **kwargs)
    load = current()
    if load is not None and load.initialises_missing:
        load.construct_unwritten(model)
    return result


# Quantizers of the library whose modules loadstone fills: these hold plain values, or
# bitsandbytes' weights. The library reads all others.
_READ_HERE = ("bitsandbytes", "fp8", "mxfp4", "mxfp8")


def _reason_against_quantizer(config: Any, files: Sequence[str] | None) -> str | None:
    from loadstone._adapters.transformers import kernels

    quantizer = config.hf_quantizer
    method = stripped_config.method_of(quantizer.quantization_config).partition("_")[0]
    if method not in _READ_HERE:
        hint = "; or dequantize=True" if _is_decodable(files) else ""
        return f"quantization_config ({method}: the library's quantizer reads it by itself{hint})"
    if method == "bitsandbytes" and not is_known("bitsandbytes"):
        known = sites_of("bitsandbytes")
        return f"quantization_config (bitsandbytes {known.version()}; known: {known.tested})"
    if not quantizer.pre_quantized and not kernels.is_known(_operation(quantizer)):
        return f"quantization_config ({type(quantizer).__name__} quantizes while it loads)"
    if getattr(quantizer.quantization_config, "llm_int8_has_fp16_weight", False):
        return "quantization_config (llm_int8_has_fp16_weight leaves weights as they are)"
    for mapping in config.weight_mapping or ():
        for operation in getattr(mapping, "operations", ()):
            if hasattr(operation, "hf_quantizer") and not kernels.is_known(operation):
                return f"quantization_config ({type(operation).__name__} has no kernel)"
    return None


def _is_decodable(files: Sequence[str] | None) -> bool:
    catalog = readable(files, allow_links=True)[0] if files else None
    return catalog is not None and quantized.is_decodable(catalog)


def _operation(quantizer: Any) -> Any:
    """The operation that a quantizer applies to a weight while the library loads."""
    try:
        return quantizer.get_quantize_ops()
    except NotImplementedError:
        return None


def _places(device_map: Any) -> set[str]:
    """The types of devices that a map names; for a strategy, its name."""
    named = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    return {str(each).partition(":")[0] for each in named}


def _is_sharded_by_others() -> bool:
    from transformers import modeling_utils
    from transformers.integrations import deepspeed

    zero3: Any = deepspeed.is_deepspeed_zero3_enabled
    fsdp: Any = modeling_utils.is_fsdp_enabled  # type: ignore[attr-defined]
    return bool(zero3() or fsdp())
