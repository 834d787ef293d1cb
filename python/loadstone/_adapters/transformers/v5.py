"""Hooks on ``from_pretrained`` of releases from 5.0 on, and recipes for their models."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from transformers import PreTrainedModel, core_model_loading, initialization, modeling_utils
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer

from loadstone._adapters import quantized
from loadstone._adapters.patch import Hook, Hooks, set_variable
from loadstone._adapters.sites import is_supported_or_warn, sites_of
from loadstone._adapters.sites.transformers import SITES
from loadstone._adapters.transformers import (
    cache,
    kernels,
    load,
    registry,
    releases,
    stripped_config,
    trainer,
)
from loadstone._adapters.transformers.conversion import ConversionInput
from loadstone._adapters.transformers.from_pretrained_session import (
    HookedFunction,
    hooks_in_calls,
    reason_against,
    unsupported,
)
from loadstone._adapters.transformers.load import TransformersV5Session
from loadstone._base.adapters import quantized_layers_of
from loadstone._base.dtypes import torch_dtype
from loadstone._base.torch_modes import wrap_always
from loadstone._files.catalog import Catalog, try_inspect
from loadstone._model.modules import owner_of
from loadstone._plan.recipes import LibraryRecipes
from loadstone._plan.ties import untied_findings
from loadstone._skeleton.constructor import construction_dtype
from loadstone._skeleton.skeleton import skeleton

Session = TransformersV5Session

# True if the release shards a model over ranks before the load.
MAKES_DTENSORS = hasattr(core_model_loading, "DtensorShardOperation")

# False while the library constructs a model in this thread.
_TIES = ContextVar("loadstone_transformers_ties", default=True)

# Quantizers whose modules loadstone fills: they contain plain values, or bitsandbytes' weights.
# The library itself reads the checkpoints of other quantizers.
_SUPPORTED_METHODS = ("bitsandbytes", "fp8", "mxfp4", "mxfp8")


def trace(
    model: Any,
    catalog: Catalog,
    requested: torch.dtype | None,
    key_mapping: Mapping[str, str] | None,
) -> LibraryRecipes:
    """See :func:`loadstone.transformers.trace`."""
    quantizer = getattr(model, "hf_quantizer", None)
    built_dtype = construction_dtype(model)
    dtype = requested or built_dtype
    conversion = ConversionInput(
        model,
        dtype,
        releases.dtype_plan(model, dtype),
        registry.conversions_of(model, key_mapping, quantizer),
        quantizer,
        built_dtype,
        is_asked=requested is not None,
    )
    result = cache.derive(catalog, conversion)
    recipes = load.as_recipes(model, catalog, result, ignores_mismatches=False)
    recipes.untied = load.untied(model, recipes.dtypes)
    recipes.findings += untied_findings(recipes.untied)
    return recipes


def hooks() -> Hooks:
    loading = _load_pretrained_model if SITES.is_since("5.1") else _load_by_class
    functions: list[HookedFunction] = [
        (PreTrainedModel, "get_init_context", _get_init_context),
        (PreTrainedModel, "init_weights", _init_weights),
        (PreTrainedModel, "_load_pretrained_model", loading),
        (PreTrainedModel, "_move_missing_keys_from_meta_to_device", _move_missing_keys),
        (modeling_utils, "get_hf_quantizer", _get_hf_quantizer),
        (modeling_utils, "_get_dtype", _get_dtype),
    ]
    for quantizer in (Bnb4BitHfQuantizer, Bnb8BitHfQuantizer):
        functions += [
            (quantizer, "validate_environment", _validate_environment),
            (quantizer, "adjust_max_memory", _adjust_max_memory),
            (quantizer, "param_element_size", _param_element_size),
        ]
    release_hooks = hooks_in_calls(functions) + registry.hooks()
    if SITES.is_since("5.1"):  # a construction suspends ties in its own thread only
        release_hooks.append(Hook(initialization, "no_tie_weights", lambda original: _no_ties))
        release_hooks.append(Hook(PreTrainedModel, "tie_weights", wrap_always(_tie_weights)))
    return Hooks(release_hooks, "transformers", trainer.hooks)


@contextlib.contextmanager
def _no_ties() -> Iterator[None]:
    with set_variable(_TIES, False):
        yield


def _tie_weights(original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs) if _TIES.get() else None


def _get_init_context(
    session: TransformersV5Session, original: Any, cls: Any, *args: Any, **kwargs: Any
) -> Any:
    contexts = original(cls, *args, **kwargs)
    if not any(isinstance(context, torch.device) for context in contexts):
        return contexts
    replaced = [
        skeleton() if isinstance(context, torch.device) else context for context in contexts
    ]
    return [*replaced, session.constructing()]


def _get_hf_quantizer(
    session: TransformersV5Session, original: Any, *args: Any, **kwargs: Any
) -> Any:
    """Return ``None`` if codecs dequantize the checkpoint; the config then has no quantization."""
    quantizer, session.stripped_config = stripped_config.choose_quantizer(
        original, session.options.dequantize, *args, **kwargs
    )
    return quantizer


def _get_dtype(
    session: TransformersV5Session,
    original: Any,
    dtype: Any,
    checkpoint_files: Any,
    config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return the dtype of values. If the config has none, the library uses the dtype of codes."""
    follows_files = dtype == "auto" and getattr(config, "dtype", None) is None
    if session.stripped_config.method and follows_files and checkpoint_files:
        catalog, _ = try_inspect(checkpoint_files)
        if catalog is not None and quantized.is_decodable(catalog):
            dtype = torch_dtype(quantized.value_dtype(catalog))
    return original(dtype, checkpoint_files, config, *args, **kwargs)


def _validate_environment(
    session: TransformersV5Session, original: Any, quantizer: Any, *args: Any, **kwargs: Any
) -> None:
    """Allow cpu and disk in device maps, which the library rejects; weights stay quantized."""
    kwargs.pop("device_map", None)
    original(quantizer, *args, **kwargs)


def _adjust_max_memory(
    session: TransformersV5Session, original: Any, quantizer: Any, max_memory: Any
) -> Any:
    """Return the whole memory, of which the library reserves some to quantize on a device."""
    return max_memory


def _param_element_size(
    session: TransformersV5Session,
    original: Any,
    quantizer: Any,
    model: Any,
    name: str,
    parameter: torch.Tensor,
) -> float:
    """Return the bytes per element including the scales, which the library does not count."""
    if not quantizer.param_needs_quantization(model, name):
        return float(original(quantizer, model, name, parameter))
    (layers,) = quantized_layers_of(owner_of(model, name))
    nbytes: int = layers.quantized_bytes(model, name)
    return nbytes / max(int(parameter.numel()), 1)


def _init_weights(session: TransformersV5Session, original: Any, model: Any) -> Any:
    """Skip initialisation in the constructor.

    The library skips it only if the default device is meta, but a skeleton does not set that.
    """
    return None if session.is_constructing else original(model)


def _load_pretrained_model(
    session: TransformersV5Session,
    original: Any,
    model: Any,
    state_dict: Any,
    checkpoint_files: list[str] | None,
    load_config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if session.model is None:  # otherwise the call loads an adapter into a loaded model
        mesh = load_config.device_mesh
        reason = reason_against(model, state_dict, checkpoint_files, mesh)
        if reason is None and load_config.hf_quantizer is not None:
            reason = _reason_against_quantizer(load_config, checkpoint_files)
        if reason is None and checkpoint_files is not None:
            return session.read(model, checkpoint_files, load_config)
        if session.options.refuses_unsupported:
            raise unsupported(reason or "no files")
        session.initialises_missing = load_config.hf_quantizer is None and mesh is None
    return original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)


def _load_by_class(
    session: TransformersV5Session, original: Any, cls: Any, *args: Any, **kwargs: Any
) -> Any:
    return _load_pretrained_model(session, functools.partial(original, cls), *args, **kwargs)


def _move_missing_keys(
    session: TransformersV5Session,
    original: Any,
    model: Any,
    missing_keys: Any,
    device_map: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not session.initialises_missing:
        return original(model, missing_keys, device_map, *args, **kwargs)
    return session.give_memory(model, set(missing_keys), device_map)


def _reason_against_quantizer(config: Any, files: Sequence[str] | None) -> str | None:
    quantizer = config.hf_quantizer
    method = stripped_config.method_of(quantizer.quantization_config).partition("_")[0]
    if method not in _SUPPORTED_METHODS:
        catalog = try_inspect(files)[0] if files else None
        is_decodable = catalog is not None and quantized.is_decodable(catalog)
        hint = "; or dequantize=True" if is_decodable else ""
        return f"quantization_config ({method}: the library's quantizer loads it{hint})"
    if method == "bitsandbytes" and not is_supported_or_warn("bitsandbytes"):
        sites = sites_of("bitsandbytes")
        return f"quantization_config (bitsandbytes {sites.version()}; known: {sites.tested})"
    if not quantizer.pre_quantized and not kernels.is_known(_quantize_operation(quantizer)):
        return f"quantization_config ({type(quantizer).__name__} quantizes while it loads)"
    if getattr(quantizer.quantization_config, "llm_int8_has_fp16_weight", False):
        return "quantization_config (llm_int8_has_fp16_weight leaves the weights unquantized)"
    for mapping in config.weight_mapping or ():
        for operation in getattr(mapping, "operations", ()):
            if hasattr(operation, "hf_quantizer") and not kernels.is_known(operation):
                return f"quantization_config ({type(operation).__name__} has no kernel)"
    return None


def _quantize_operation(quantizer: Any) -> Any:
    try:
        return quantizer.get_quantize_ops()
    except NotImplementedError:
        return None
