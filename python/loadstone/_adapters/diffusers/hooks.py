"""Hooks on the loaders of diffusers.

The hooks replace: reading a file (diffusers' converters run on symbols), the model's construction
(a skeleton with real buffers), the assignment of tensors, the cast of the whole model, and the
device map, which diffusers discards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from loadstone._adapters.diffusers import pipelines, quantizers
from loadstone._adapters.diffusers.call import OPTIONS, WANTED_DTYPE, current, loading
from loadstone._adapters.diffusers.checkpoint import SymbolicCheckpoint, is_readable
from loadstone._adapters.diffusers.config_mismatch import ConfigSources
from loadstone._adapters.diffusers.expected_keys import RetryError
from loadstone._adapters.diffusers.load import (
    DiffusersSession,
    Request,
    WrongConfigError,
    conversion_of,
    has_own_names,
    require_series,
    skip_keys,
)
from loadstone._adapters.diffusers.missing_keys import MissingKeys, find_missing_keys
from loadstone._adapters.diffusers.pipelines import CONVERTING, DEFERRED, ConvertedError
from loadstone._adapters.diffusers.quantizers import (
    check_for_library,
    is_bitsandbytes,
    is_known,
    quantized_sizes,
)
from loadstone._adapters.diffusers.supplements import supplement
from loadstone._adapters.patch import Hook, Hooks, suspended, with_hooks_of, wrap_if_active
from loadstone._adapters.sites.diffusers import SITES
from loadstone._base.errors import PlanError, make
from loadstone._base.machine import MODES
from loadstone._base.torch_modes import constructing, wrap_always
from loadstone._plan.placement import expanded, gathered, require_paths
from loadstone._skeleton.constructor import locked_skeleton
from loadstone.tracing import Symbol

# Reasons to retry: a different config, keys that the converter requests in vain, and tensors that
# it ignores (twice, because a different config selects a different converter).
ATTEMPTS_MAX = 6

# Does `from_single_file` take a device map?
PLACES_FILES = SITES.is_since("0.36")


@functools.cache
def hooks() -> Hooks:
    import accelerate
    from diffusers import configuration_utils
    from diffusers.loaders import single_file_model, single_file_utils
    from diffusers.loaders.peft import PeftAdapterMixin
    from diffusers.models import modeling_utils

    places: list[tuple[Any, str, Any]] = [
        (single_file_model.FromOriginalModelMixin, "from_single_file", _model_from_single_file),
        (single_file_model, "init_empty_weights", _init_empty_weights),
        (single_file_model, "load_model_dict_into_meta", _load_dict),
        (single_file_model, "_get_mapping_function_kwargs", _mapping_arguments),
        (single_file_model, "_should_convert_state_dict_to_diffusers", _should_convert),
        (single_file_model, "dispatch_model", _dispatch_model),
        (single_file_utils, "load_state_dict", _load_state_dict),
        (single_file_utils, "init_empty_weights", _init_empty_weights),
        (single_file_utils, "load_model_dict_into_meta", _load_dict),
        (modeling_utils, "_determine_device_map", _determine_device_map),
        (modeling_utils, "dispatch_model", _dispatch_model_of_folder),
        (modeling_utils.ModelMixin, "to", _to),
        (modeling_utils.ModelMixin, "from_pretrained", _model_from_pretrained),
        (modeling_utils.ModelMixin, "_load_pretrained_model", _load_pretrained_model),
        (modeling_utils, "load_state_dict", _load_state_dict),
        (accelerate, "init_empty_weights", _init_empty_weights),
        (PeftAdapterMixin, "load_lora_adapter", with_hooks_of("peft")),
        (PeftAdapterMixin, "add_adapter", with_hooks_of("peft")),
        *quantizers.places(),
    ]
    if PLACES_FILES:
        places.append((single_file_model, "_determine_device_map", _determine_device_map))
    turns = [
        Hook(modeling_utils.ModelMixin, "_set_default_torch_dtype", wrap_always(_set_dtype_later)),
        Hook(configuration_utils.ConfigMixin, "from_config", wrap_always(_from_config)),
    ]
    return Hooks(
        [Hook(owner, name, wrap_if_active("diffusers", wrapper)) for owner, name, wrapper in places]
        + turns,
        "diffusers",
        pipelines.late_hooks,
    )


# --- construction --------------------------------------------------------------------------------


def _set_dtype_later(original: Any, cls: Any, dtype: torch.dtype) -> None:
    """Defer the setting, because diffusers does not restore it if the construction fails."""
    with constructing():
        original(cls, dtype)  # raises for a dtype that models cannot have
    WANTED_DTYPE.set(dtype)


def _from_config(original: Any, *args: Any, **kwargs: Any) -> Any:
    dtype = WANTED_DTYPE.get()
    if dtype is None and current() is None:
        return original(*args, **kwargs)
    WANTED_DTYPE.set(None)
    with constructing(dtype):
        model = original(*args, **kwargs)
    load = current()
    if load is not None and load.model is None and not PLACES_FILES:
        load.model = model  # not a copy of it, built for missing values
    return model


# --- single files --------------------------------------------------------------------------------


def _model_from_single_file(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    source = args[0] if args else kwargs.pop("pretrained_model_link_or_path_or_dict", None)
    refuses_unsupported = OPTIONS.get().refuses_unsupported
    if kwargs.get("device_map") is not None and not PLACES_FILES and refuses_unsupported:
        message = "this release of diffusers has no device map for single files"
        raise make("plan.options", message, field="device_map", expected="diffusers 0.36 or later")
    if isinstance(source, SymbolicCheckpoint) or is_readable([str(source)]):
        kwargs["low_cpu_mem_usage"] = True  # the other way copies from tensors that have no data
    with contextlib.ExitStack() as stack:
        missing = MissingKeys()
        for _ in range(ATTEMPTS_MAX - 1):
            try:
                return _attempt(original, cls, source, kwargs, missing)
            except WrongConfigError as wrong:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                text = json.dumps(wrong.config, default=str)
                (Path(folder) / "config.json").write_text(text)
                kwargs |= {"config": folder, "subfolder": None}
                missing = MissingKeys()  # another config, another converter
            except RetryError as retry:
                missing = retry.missing_keys
        return _attempt(original, cls, source, kwargs, missing)


def _attempt(
    original: Any, cls: Any, source: Any, kwargs: dict[str, Any], missing: MissingKeys
) -> Any:
    with loading() as load:
        load.missing_keys = missing
        load.config_sources = ConfigSources(kwargs.get("config"), kwargs.get("cache_dir"))
        try:
            model = original(cls, _prepared(load, source, kwargs), **kwargs)
        except (PlanError, KeyError):
            known = load.conversion if not missing else None
            found = None if known is None else find_missing_keys(known)
            if not found:
                raise
            raise RetryError(found) from None
        load.finish(model)
    return model


def _prepared(load: DiffusersSession, source: Any, kwargs: dict[str, Any]) -> Any:
    """Open the source for a converter; leave a path to diffusers, which opens it later."""
    config = kwargs.get("quantization_config")
    load.keeps_blocks = config is not None and not is_bitsandbytes(config)
    if not isinstance(source, SymbolicCheckpoint):
        return source
    return (source.fresh if load.keeps_blocks else source.decoded)(load.missing_keys)


def _mapping_arguments(original: Any, function: Any, **kwargs: Any) -> Any:
    arguments: dict[str, Any] = original(function, **kwargs)
    load = current()
    if load is not None:
        load.mapping = function, arguments
    return arguments


def _should_convert(original: Any, state: Any, checkpoint: Any) -> Any:
    """Record the conversion before it runs, to repeat it if it fails."""
    load = current()
    if load is None or not isinstance(checkpoint, SymbolicCheckpoint):
        return original(state, checkpoint)
    if has_own_names(state, checkpoint):
        return False
    require_series(checkpoint)
    if load.mapping is not None and load.model is not None:
        load.conversion = conversion_of(load.model, checkpoint, *load.mapping)
    return True


def _load_state_dict(original: Any, checkpoint_file: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(checkpoint_file, dict) or not is_readable([str(checkpoint_file)]):
        if OPTIONS.get().refuses_unsupported and not isinstance(checkpoint_file, dict):
            raise make(
                "plan.options",
                "this file type is not supported: call the class's own function",
                path=str(checkpoint_file),
                field="file",
            )
        return original(checkpoint_file, *args, **kwargs)
    checkpoint = SymbolicCheckpoint.open([str(checkpoint_file)])
    load = current()
    if load is not None and load.missing_keys:
        checkpoint = checkpoint.fresh(load.missing_keys)
    if load is not None and not load.keeps_blocks:
        checkpoint.decode()
    return checkpoint


def _init_empty_weights(original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs) if current() is None else locked_skeleton()


def _determine_device_map(
    original: Any, model: Any, device_map: Any, max_memory: Any = None, *rest: Any
) -> Any:
    """Keep the map, which diffusers discards, in a form that hooks support."""
    load = current()
    if load is not None:
        load.model = model
    if load is None or device_map is None:
        return original(model, device_map, max_memory, *rest)
    if load.options.max_memory is not None:
        max_memory = load.options.max_memory
    if isinstance(device_map, str) and device_map in MODES:
        with quantized_sizes(model):
            found = original(model, device_map, max_memory, *rest)
        load.device_map = gathered(model, found)
        return load.device_map
    places = device_map if isinstance(device_map, Mapping) else {"": device_map}
    if load.options.refuses_unsupported:
        require_paths(model, places)
    load.device_map = expanded(model, places)
    return load.device_map


def _load_dict(original: Any, model: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
    if CONVERTING.get():
        raise ConvertedError(state_dict)
    checkpoint = _checkpoint_of(state_dict)
    if checkpoint is None:
        return original(model, state_dict, *args, **kwargs)
    load = current() or DiffusersSession(OPTIONS.get())
    conversion, load.conversion = load.conversion, None
    if load.conversion_of is not None:
        conversion = load.conversion_of(model)
    dtype = args[0] if args else kwargs.get("dtype")
    # Converters that ask with a default write None for what the file lacks.
    converted = {name: value for name, value in state_dict.items() if value is not None}
    supplement(converted, model.state_dict())
    unexpected = kwargs.get("unexpected_keys") or []  # diffusers warns about its contents later
    unexpected[:] = [name for name in unexpected if name in converted]
    _read(
        load,
        Request(
            model,
            converted,
            checkpoint,
            dtype=dtype,
            keeps=kept_in_float32(model, dtype),
            quantizer=kwargs.get("hf_quantizer"),
            device_map=load.device_map or kwargs.get("device_map"),
            conversion=conversion,
        ),
    )
    return None, None


def _read(load: DiffusersSession, request: Request) -> None:
    components = DEFERRED.get()
    if components is None:
        load.read(request)
    else:
        load.prepare(request)
        components.loads[components.name] = load


def _dispatch_model(original: Any, model: Any, **kwargs: Any) -> Any:
    load = current()
    if load is None or load.model is not model or (load.plan and load.device_map is None):
        return original(model, **kwargs)
    load.device_map = load.device_map or kwargs["device_map"]
    load.dispatch()
    return model


def _to(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Skip the cast of a loaded model, which would round float32 modules."""
    load = current()
    is_cast = any(isinstance(each, torch.dtype) for each in (*args, *kwargs.values()))
    if load is not None and load.is_traced and load.model is model and is_cast:
        return model
    return original(model, *args, **kwargs)


# --- folders -------------------------------------------------------------------------------------


def _model_from_pretrained(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("ignore_mismatched_sizes"):
        if OPTIONS.get().refuses_unsupported:
            message = "ignore_mismatched_sizes is not supported: call the library's from_pretrained"
            raise make("plan.options", message, field="ignore_mismatched_sizes")
        with suspended("diffusers"):
            return original(cls, *args, **kwargs)
    if kwargs.get("device_map") == "disk":
        kwargs["device_map"] = {"": "disk"}
    with loading() as load:
        result = original(cls, *args, **kwargs)
        load.finish(result[0] if isinstance(result, tuple) else result)
    return result


def _dispatch_model_of_folder(original: Any, model: Any, **kwargs: Any) -> Any:
    """Add ``skip_keys``, which diffusers passes for pipelines but not for models."""
    if current() is not None:
        kwargs.setdefault("skip_keys", skip_keys(model))
    return original(model, **kwargs)


def _load_pretrained_model(
    original: Any,
    cls: Any,
    model: Any,
    state_dict: Any,
    resolved_model_file: list[str],
    *args: Any,
    **kwargs: Any,
) -> Any:
    load = current()
    checkpoint = state_dict if isinstance(state_dict, SymbolicCheckpoint) else None
    if checkpoint is None and load is not None and is_readable(resolved_model_file):
        checkpoint = SymbolicCheckpoint.open(resolved_model_file)
        model._fix_state_dict_keys_on_load(checkpoint)
    quantizer = kwargs.get("hf_quantizer")
    is_ours = quantizer is None or is_known(quantizer)
    if load is None or checkpoint is None or not is_ours:
        if load is not None and quantizer is not None:
            check_for_library(quantizer, kwargs.get("device_map"), load.options.refuses_unsupported)
        return original(cls, model, state_dict, resolved_model_file, *args, **kwargs)
    folder = kwargs.get("offload_folder")
    if folder is not None:  # the component's folder in a pipeline
        load.options = dataclasses.replace(load.options, offload_folder=folder)
    names = set(model.state_dict())
    _read(
        load,
        Request(
            model,
            checkpoint,
            checkpoint,
            dtype=kwargs.get("dtype"),
            keeps=tuple(kwargs.get("keep_in_fp32_modules") or ()),
            quantizer=quantizer,
            device_map=kwargs.get("device_map"),
        ),
    )
    missing = sorted(names - set(checkpoint))
    unexpected = _reportable(cls, sorted(set(checkpoint) - names))
    if unexpected:
        source = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        logging.getLogger("diffusers.models.modeling_utils").warning(
            f"Some weights of the model checkpoint at {source} were not used when initializing "
            f"{cls.__name__}: {', '.join(unexpected)}"
        )
    return model, missing, unexpected, [], load.offload_index or None, []


def _reportable(cls: Any, names: list[str]) -> list[str]:
    patterns = getattr(cls, "_keys_to_ignore_on_load_unexpected", None) or ()
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


def _checkpoint_of(state_dict: Any) -> SymbolicCheckpoint | None:
    if isinstance(state_dict, SymbolicCheckpoint):
        return state_dict
    first = next((each for each in state_dict.values() if isinstance(each, Symbol)), None)
    checkpoint: SymbolicCheckpoint | None = None if first is None else first.tracer.owner
    return checkpoint


def kept_in_float32(model: Any, dtype: Any) -> tuple[str, ...]:
    """Return the modules that ``from_pretrained`` keeps in float32.

    diffusers casts them if it loads a single file. transformers models keep them in float16 only.
    """
    kept = getattr(type(model), "_keep_in_fp32_modules", None)
    is_own = hasattr(type(model), "_fix_state_dict_keys_on_load")
    if kept is None or dtype not in (torch.float16, torch.bfloat16 if is_own else None):
        return ()
    return tuple(kept) if isinstance(kept, list | tuple | set) else (kept,)
