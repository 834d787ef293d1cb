"""Hooks on the loaders of diffusers.

The hooks replace the reading of a file (diffusers' converters run on symbols), the construction of
the model (a skeleton with real buffers), the assignment of tensors, the cast of the whole model,
and the device map, which diffusers discards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from loadstone import _core
from loadstone._adapters.accelerate_hooks import without_false_warning
from loadstone._adapters.diffusers import local_configs, pipelines, quantizers
from loadstone._adapters.diffusers.arguments import convert_dtypes
from loadstone._adapters.diffusers.checkpoint import SymbolicCheckpoint, checkpoint_of, is_readable
from loadstone._adapters.diffusers.conversion import conversion_of, convert, has_own_names
from loadstone._adapters.diffusers.load import (
    CURRENT_SESSION,
    OPTIONS,
    WANTED_DTYPE,
    DiffusersSession,
    loading,
    skip_keys,
)
from loadstone._adapters.diffusers.local_configs import ConfigSources, LocalConfig
from loadstone._adapters.diffusers.pipelines import CONVERTED, DEFERRED
from loadstone._adapters.diffusers.quantizers import (
    check_for_library,
    is_bitsandbytes,
    is_known,
    quantized_sizes,
)
from loadstone._adapters.diffusers.recipes import ModelRequest, WrongConfigError, float32_modules
from loadstone._adapters.patch import Hook, Hooks, suspended, with_hooks, within, wrap_if_active
from loadstone._adapters.quantized import is_decodable
from loadstone._adapters.saving import save_with_values
from loadstone._adapters.sites.diffusers import SITES
from loadstone._base.errors import FormatError, LoadError, PlanError, new_error
from loadstone._base.machine import MODES
from loadstone._base.torch_modes import constructing, wrap_always
from loadstone._base.warn import users_level, warn
from loadstone._plan.placement import expanded, gathered, require_paths
from loadstone._skeleton.constructor import locked_skeleton

# Limit on the configs of a load: a config may select a converter that requires another config.
CONFIGS_MAX = 6

# True if `from_single_file` takes a device map.
PLACES_FILES = SITES.is_since("0.36")


@functools.cache
def hooks() -> Hooks:
    import accelerate
    from diffusers import configuration_utils
    from diffusers.loaders import single_file_model, single_file_utils
    from diffusers.loaders.peft import PeftAdapterMixin
    from diffusers.models import modeling_utils

    entry_points: list[tuple[Any, str, Any]] = [
        (single_file_model.FromOriginalModelMixin, "from_single_file", _model_from_single_file),
        (single_file_utils, "load_state_dict", _load_state_dict),
        (modeling_utils.ModelMixin, "from_pretrained", _model_from_pretrained),
        (modeling_utils.ModelMixin, "save_pretrained", save_with_values),
        (modeling_utils, "load_state_dict", _load_state_dict),
        (PeftAdapterMixin, "load_lora_adapter", with_hooks("peft")),
        (PeftAdapterMixin, "add_adapter", with_hooks("peft")),
    ]
    inner: list[tuple[Any, str, Any]] = [
        (single_file_model, "init_empty_weights", _init_empty_weights),
        (single_file_model, "load_model_dict_into_meta", _load_model_dict),
        (single_file_model, "_get_mapping_function_kwargs", _get_mapping_function_kwargs),
        (single_file_model, "_should_convert_state_dict_to_diffusers", _should_convert),
        (single_file_model, "dispatch_model", _dispatch_model),
        (single_file_utils, "init_empty_weights", _init_empty_weights),
        (single_file_utils, "load_model_dict_into_meta", _load_model_dict),
        (modeling_utils, "_determine_device_map", _determine_device_map),
        (modeling_utils, "dispatch_model", _dispatch_model_of_folder),
        (modeling_utils.ModelMixin, "to", _to),
        (configuration_utils.ConfigMixin, "load_config", _load_config),
        (modeling_utils.ModelMixin, "_load_pretrained_model", _load_pretrained_model),
        (accelerate, "init_empty_weights", _init_empty_weights),
        *quantizers.replacements(),
    ]
    if PLACES_FILES:
        inner.append((single_file_model, "_determine_device_map", _determine_device_map))
    replacements = [
        *entry_points,
        *(
            (owner, name, within(CURRENT_SESSION, replacement))
            for owner, name, replacement in inner
        ),
    ]
    return Hooks(
        [
            *(
                Hook(owner, name, wrap_if_active("diffusers", replacement))
                for owner, name, replacement in replacements
            ),
            Hook(modeling_utils.ModelMixin, "_set_default_torch_dtype", wrap_always(_defer_dtype)),
            Hook(configuration_utils.ConfigMixin, "from_config", wrap_always(_from_config)),
        ],
        "diffusers",
        pipelines.late_hooks,
    )


# --- construction --------------------------------------------------------------------------------


def _defer_dtype(original: Any, cls: Any, dtype: torch.dtype) -> None:
    """Defer the default dtype, which diffusers does not restore if the construction fails."""
    with constructing():
        original(cls, dtype)  # raises for a dtype that models cannot have
    WANTED_DTYPE.set(dtype)


def _from_config(original: Any, *args: Any, **kwargs: Any) -> Any:
    dtype, session = WANTED_DTYPE.get(), CURRENT_SESSION.get()
    if dtype is None and session is None:
        return original(*args, **kwargs)
    WANTED_DTYPE.set(None)
    with constructing(dtype):
        model = original(*args, **kwargs)
    if session is not None and session.model is None and not PLACES_FILES:
        session.model = model  # not the copy that is built later for missing values
    return model


def _load_config(session: DiffusersSession, original: Any, *args: Any, **kwargs: Any) -> Any:
    loaded = _cached_config(session, original, *args, **kwargs) or original(*args, **kwargs)
    config = loaded[0] if isinstance(loaded, tuple) else loaded
    session.unread_config = quantizers.strip_config(config, session.is_single_file)
    return loaded


def _cached_config(session: DiffusersSession, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a single file's config from the cache, where diffusers looks after asking the hub."""
    name = kwargs.get("pretrained_model_name_or_path")
    if not session.is_single_file or name is None or Path(name).exists():
        return None
    if not kwargs.get("local_files_only"):
        with contextlib.suppress(OSError):
            return original(*args, **kwargs | {"local_files_only": True})
        local_configs.warn_of_request(name)
    return None


# --- single files --------------------------------------------------------------------------------


def _model_from_single_file(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    source = args[0] if args else kwargs.pop("pretrained_model_link_or_path_or_dict", None)
    refuses_unsupported = OPTIONS.get().refuses_unsupported
    convert_dtypes(kwargs, refuses_unsupported)
    if kwargs.get("device_map") is not None and not PLACES_FILES and refuses_unsupported:
        message = "this release of diffusers does not support device_map for single files"
        raise new_error(
            "plan.options", message, field="device_map", expected="diffusers 0.36 or later"
        )
    if isinstance(source, SymbolicCheckpoint) or is_readable([str(source)]):
        kwargs["low_cpu_mem_usage"] = True  # otherwise diffusers copies from tensors without data
    *starts, last = _config_starts(cls, source, kwargs)
    for start in starts:
        try:
            return _load_with_fitting_config(original, cls, source, kwargs, start)
        except start.failures as failure:
            if isinstance(failure, FormatError | LoadError):
                raise
    return _load_with_fitting_config(original, cls, source, kwargs, last)


def _load_with_fitting_config(
    original: Any, cls: Any, source: Any, kwargs: Mapping[str, Any], start: _ConfigStart
) -> Any:
    options, notes = {**kwargs, **start.options}, start.notes
    with contextlib.ExitStack() as stack:
        for _ in range(CONFIGS_MAX):
            try:
                model = _load_single_file(original, cls, source, options, notes)
            except WrongConfigError as wrong:
                if not (wrong.is_local or start.may_change):
                    raise
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                Path(folder, "config.json").write_text(json.dumps(wrong.config, default=str))
                options |= {"config": folder, "subfolder": None}
                notes = [_inferred(wrong.description, wrong.is_local)]
                continue
            for note in notes:
                warn(note.message, stacklevel=users_level())
            return model
    raise AssertionError("no config fits")


@dataclasses.dataclass(frozen=True)
class _ConfigStart:
    """The first config of a load.

    Attributes:
        options: arguments that select the config.
        may_change: the load may use this config with changed fields.
        failures: errors after which the load tries the next start.
    """

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: list[_core.Finding] = dataclasses.field(default_factory=list)
    may_change: bool = True
    failures: tuple[type[Exception], ...] = (OSError,)


def _config_starts(cls: Any, source: Any, kwargs: Mapping[str, Any]) -> list[_ConfigStart]:
    """Return the configs to start with: to infer one, local configs before the hub's."""
    is_given = kwargs.get("config") is not None or kwargs.get("original_config") is not None
    if is_given or not OPTIONS.get().infer_config or not isinstance(source, str | os.PathLike):
        return [_ConfigStart()]
    file = os.fspath(source)
    if (beside := local_configs.beside(cls, file)) is not None:
        return [_start(beside)]
    cached = _ConfigStart({"local_files_only": True})
    hub = [] if kwargs.get("local_files_only") else [_ConfigStart()]
    sources = ConfigSources(cache=kwargs.get("cache_dir"))
    if local := local_configs.find(cls, [file], sources)[:1]:
        first = _start(local[0])
        failures = (OSError, PlanError, WrongConfigError)
        fitting = dataclasses.replace(first, may_change=False, failures=failures)
        return [cached, fitting, *hub, first]
    return [cached, *hub]


def _start(local: LocalConfig) -> _ConfigStart:
    options = {"config": local.name, "subfolder": local.subfolder or None, "local_files_only": True}
    return _ConfigStart(options, [_inferred(str(local), is_local=True)])


def _inferred(description: str, is_local: bool) -> _core.Finding:
    message = f"the config is inferred: {description}"
    if not is_local:
        message += "; no shape of the file determines its other fields, so check these"
    return _core.Finding("info", "plan.config_mismatch", "", [], message)


def _load_single_file(
    original: Any, cls: Any, source: Any, kwargs: dict[str, Any], notes: list[_core.Finding]
) -> Any:
    quantization = kwargs.get("quantization_config")
    with loading() as session:
        _use_device_options(session, kwargs)
        session.is_single_file, session.notes = True, notes
        session.config_sources = ConfigSources(
            kwargs.get("config"), kwargs.get("cache_dir"), session.options.refuses_unsupported
        )
        session.keeps_codes = is_bitsandbytes(quantization)
        if quantization is not None and not session.keeps_codes:
            session.kernel = ""
        if isinstance(source, SymbolicCheckpoint):
            source = source.fresh(kernel=session.kernel, keeps_codes=session.keeps_codes)
        model = original(cls, source, **kwargs)
        session.report_and_audit(model)
    return model


def _use_device_options(session: DiffusersSession, kwargs: Mapping[str, Any]) -> None:
    """Use the options that the library's function received, or ignores for single files."""
    given = {
        name: kwargs[name]  # in a pipeline, the component's own folder
        for name in ("offload_folder", "max_memory")
        if kwargs.get(name) is not None
    }
    session.options = dataclasses.replace(session.options, **given)


def _get_mapping_function_kwargs(
    session: DiffusersSession, original: Any, function: Any, **kwargs: Any
) -> Any:
    arguments: dict[str, Any] = original(function, **kwargs)
    session.converter = function, arguments
    return arguments


def _should_convert(session: DiffusersSession, original: Any, state: Any, checkpoint: Any) -> Any:
    """Convert the checkpoint in place, because diffusers stops at the first missing key."""
    if not isinstance(checkpoint, SymbolicCheckpoint):
        return original(state, checkpoint)
    if not has_own_names(state, checkpoint):
        assert session.converter is not None
        session.conversion = conversion_of(session.model, checkpoint, *session.converter)
        session.conversion.kernel = session.kernel
        converted = convert(session.conversion, checkpoint)
        checkpoint.clear()
        dict.update(checkpoint, converted)
    return False


def _load_state_dict(original: Any, checkpoint_file: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(checkpoint_file, dict) or not is_readable([str(checkpoint_file)]):
        if OPTIONS.get().refuses_unsupported and not isinstance(checkpoint_file, dict):
            raise new_error(
                "plan.options",
                "this file type is not supported: call the class's own function",
                path=str(checkpoint_file),
                field="file",
            )
        return original(checkpoint_file, *args, **kwargs)
    session = CURRENT_SESSION.get()  # None for a pipeline, whose models get copies
    if session is None:
        return SymbolicCheckpoint.open([str(checkpoint_file)])
    return SymbolicCheckpoint.open([str(checkpoint_file)], session.kernel, session.keeps_codes)


def _init_empty_weights(*_: Any, **__: Any) -> Any:
    return locked_skeleton()


def _determine_device_map(
    session: DiffusersSession,
    original: Any,
    model: Any,
    device_map: Any,
    max_memory: Any = None,
    *args: Any,
) -> Any:
    """Keep the device map, which diffusers discards, in a form that accelerate supports."""
    session.model = model
    if session.options.max_memory is not None:
        max_memory = session.options.max_memory
    if device_map is None:
        session.max_memory = max_memory
        return original(model, device_map, max_memory, *args)
    if isinstance(device_map, str) and device_map in MODES:
        with quantized_sizes(model):
            computed = original(model, device_map, max_memory, *args)
        session.device_map = gathered(model, computed)
        return session.device_map
    if not isinstance(device_map, Mapping):
        device_map = {"": device_map}
    if session.options.refuses_unsupported:
        require_paths(model, device_map)
    session.device_map = expanded(model, device_map)
    session.max_memory = max_memory
    return session.device_map


def _load_model_dict(
    session: DiffusersSession, original: Any, model: Any, state_dict: Any, *args: Any, **kwargs: Any
) -> Any:
    converted = CONVERTED.get()
    if converted is not None:
        converted.update(state_dict)
        return None, None
    checkpoint = checkpoint_of(state_dict)
    if checkpoint is None:
        return original(model, state_dict, *args, **kwargs)
    if session.encoder_conversion is not None:
        session.conversion = session.encoder_conversion(model)
    dtype = args[0] if args else kwargs.get("dtype")
    _read(
        session,
        ModelRequest(
            model,
            state_dict,
            checkpoint,
            dtype=dtype,
            float32_modules=float32_modules(model, dtype),
            quantizer=kwargs.get("hf_quantizer"),
            device_map=session.device_map or kwargs.get("device_map"),
            conversion=session.conversion,
            config_sources=session.config_sources,
        ),
    )
    return None, None


def _read(session: DiffusersSession, request: ModelRequest) -> None:
    sessions = DEFERRED.get()
    if sessions is None:
        session.read(request)
    else:
        session.trace(request)
        sessions[""] = session


def _dispatch_model(session: DiffusersSession, original: Any, model: Any, **kwargs: Any) -> Any:
    if session.model is not model or (session.plan and session.device_map is None):
        return original(model, **kwargs)
    session.device_map = session.device_map or kwargs["device_map"]
    session.dispatch()
    return model


def _to(session: DiffusersSession, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Skip the cast of a loaded model, which would round float32 modules."""
    is_cast = any(isinstance(argument, torch.dtype) for argument in (*args, *kwargs.values()))
    if session.recipes is not None and session.model is model and is_cast:
        return model
    return original(model, *args, **kwargs)


# --- folders -------------------------------------------------------------------------------------


def _model_from_pretrained(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    convert_dtypes(kwargs, OPTIONS.get().refuses_unsupported)
    if kwargs.get("ignore_mismatched_sizes"):
        if OPTIONS.get().refuses_unsupported:
            message = "ignore_mismatched_sizes is not supported: call the library's from_pretrained"
            raise new_error("plan.options", message, field="ignore_mismatched_sizes")
        with suspended("diffusers"):
            return original(cls, *args, **kwargs)
    if kwargs.get("device_map") == "disk":
        kwargs["device_map"] = {"": "disk"}
    with loading() as session:
        result = original(cls, *args, **kwargs)
        session.report_and_audit(result[0] if isinstance(result, tuple) else result)
    return result


def _dispatch_model_of_folder(
    session: DiffusersSession, original: Any, model: Any, **kwargs: Any
) -> Any:
    """Add ``skip_keys``, which diffusers passes for pipelines but not for models."""
    kwargs.setdefault("skip_keys", skip_keys(model))
    with without_false_warning(model, kwargs["device_map"]):
        return original(model, **kwargs)


def _load_pretrained_model(
    session: DiffusersSession,
    original: Any,
    cls: Any,
    model: Any,
    state_dict: Any,
    resolved_model_file: list[str],
    *args: Any,
    **kwargs: Any,
) -> Any:
    quantizer, device_map = kwargs.get("hf_quantizer"), kwargs.get("device_map")
    if session.unread_config is not None and not is_readable(resolved_model_file):
        raise session.unread_config
    checkpoint, keeps_codes = None, is_bitsandbytes(quantizer)
    if isinstance(state_dict, SymbolicCheckpoint):
        checkpoint = state_dict.fresh(kernel=session.kernel, keeps_codes=keeps_codes)
    elif is_readable(resolved_model_file):
        checkpoint = SymbolicCheckpoint.open(resolved_model_file, session.kernel, keeps_codes)
    if checkpoint is None or not (quantizer is None or is_known(quantizer)):
        check_for_library(quantizer, device_map, session.options.refuses_unsupported)
        if session.options.dry_run:
            message = "diffusers does this load itself, so loadstone has no plan for it"
            raise new_error("plan.options", message, field="dry_run")
        return original(cls, model, state_dict, resolved_model_file, *args, **kwargs)
    if session.unread_config is not None and not is_decodable(checkpoint.catalog):
        raise session.unread_config
    model._fix_state_dict_keys_on_load(checkpoint)
    _use_device_options(session, kwargs)
    names = model.state_dict().keys()
    _read(
        session,
        ModelRequest(
            model,
            checkpoint,
            checkpoint,
            dtype=kwargs.get("dtype"),
            float32_modules=tuple(kwargs.get("keep_in_fp32_modules") or ()),
            quantizer=quantizer,
            device_map=device_map,
            config_sources=session.config_sources,
        ),
    )
    assert session.recipes is not None
    ignored = getattr(cls, "_keys_to_ignore_on_load_unexpected", None) or ()
    unexpected = [
        name
        for name in sorted(name for name, _ in session.recipes.unexpected)
        if not any(re.search(pattern, name) for pattern in ignored)
    ]
    if unexpected:
        source = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        logging.getLogger("diffusers.models.modeling_utils").warning(
            f"Some weights of the model checkpoint at {source} were not used when initializing "
            f"{cls.__name__}: {', '.join(unexpected)}"
        )
    missing = sorted(names - checkpoint.keys())
    return model, missing, unexpected, [], session.offload_index or None, []
