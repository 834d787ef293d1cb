"""Hooks on the library's ``from_pretrained``.

The hooks replace the construction of the model (by a skeleton with real buffers), the reading of
the checkpoint, and the allocation of missing tensors (the library's allocation overwrites every
non-persistent buffer with uninitialised memory). The library's code does everything else.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from transformers import PreTrainedModel, modeling_utils
from transformers.integrations import deepspeed
from transformers.integrations.peft import PeftAdapterMixin

from loadstone._adapters.patch import (
    Hook,
    Hooks,
    set_variable,
    suspended,
    with_hooks,
    wrap_if_active,
)
from loadstone._adapters.saving import save_with_values
from loadstone._adapters.sites.transformers import SITES
from loadstone._adapters.transformers.from_pretrained_session import (
    CURRENT_SESSION,
    DEFAULTS,
    FromPretrainedSession,
    hooks_in_calls,
    unsupported,
)
from loadstone._base.keywords import refuse_misspelled
from loadstone._base.machine import MODES
from loadstone._base.torch_modes import construct, constructing, ordinary_tensors, wrap_always
from loadstone._plan.options import NAMES
from loadstone._plan.placement import expanded

# Imports only the module for the installed release, which lacks names that the other module
# imports.
if SITES.is_since("5.0"):
    from loadstone._adapters.transformers import v5

    RELEASE: ModuleType = v5
else:
    from loadstone._adapters.transformers import v4

    RELEASE = v4

OPTIONS = ContextVar("loadstone_transformers_options", default=DEFAULTS)

# Arguments that request a different kind of load.
_OTHER_LOADS = ("state_dict", "gguf_file")
# Arguments that also request one, unless the release makes DTensors, which loadstone checks later.
_DISTRIBUTED_LOADS = ("tp_plan", "tp_size", "distributed_config", "device_mesh")


@functools.cache
def hooks() -> Hooks:
    loading = wrap_if_active("transformers", _from_pretrained)
    saving = wrap_if_active("transformers", save_with_values)
    adding_adapter = wrap_if_active("transformers", _with_adapter)
    in_calls = hooks_in_calls(
        [
            (PreTrainedModel, "_initialize_missing_keys", _initialize_missing_keys),
            (modeling_utils, "_get_device_map", _get_device_map),
        ]
    )
    release_hooks = RELEASE.hooks()
    return Hooks(
        [
            Hook(PreTrainedModel, "from_pretrained", loading),
            Hook(PreTrainedModel, "save_pretrained", saving),
            Hook(PeftAdapterMixin, "load_adapter", adding_adapter),
            Hook(PeftAdapterMixin, "add_adapter", adding_adapter),
            *in_calls,
            *release_hooks,
            Hook(PreTrainedModel, "get_init_context", wrap_always(_one_context)),
            Hook(PreTrainedModel, "_from_config", wrap_always(construct)),
        ],
        "transformers",
        release_hooks.late,
    )


def _config_fields(cls: Any, folder: Any = None) -> Iterable[str]:
    """Return the names in a folder's config.json, which a config class may not declare."""
    with contextlib.suppress(Exception):  # the library reports errors of the folder
        return [*cls.config_class.get_config_dict(folder)[0]]
    return ()


def _from_pretrained(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    options = OPTIONS.get()
    if options.refuses_unsupported:
        config = kwargs.get("config")
        if not hasattr(config, "attribute_map"):
            config = cls.config_class
        aliases = getattr(config, "attribute_map", {})
        fields = functools.partial(_config_fields, cls, *args[:1])
        refuse_misspelled(kwargs, [*NAMES, *aliases], (original, cls), config, fields)
    other_loads = _OTHER_LOADS + (() if RELEASE.MAKES_DTENSORS else _DISTRIBUTED_LOADS)
    obstacles = [name for name in other_loads if kwargs.get(name) is not None]
    if _is_sharded_by_others():
        obstacles.append("DeepSpeed or FSDP")
    devices = _device_types(kwargs.get("device_map"))
    if "meta" in devices and len(devices) > 1:
        obstacles.append("device_map (meta with other devices)")
    hooks().refresh()
    if obstacles and options.refuses_unsupported:
        raise unsupported(obstacles[0])
    if obstacles or devices == {"meta"}:  # the caller wants the model on meta
        with suspended("transformers"):
            return original(cls, *args, **kwargs)
    with ordinary_tensors(), set_variable(CURRENT_SESSION, RELEASE.Session(options)) as session:
        if kwargs.get("device_map") not in MODES:
            session.max_memory = kwargs.get("max_memory")
        result = original(cls, *args, **kwargs)
        session.report_and_audit(result[0] if isinstance(result, tuple) else result)
    return result


def _one_context(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Combine all contexts, because the library does not exit them if a later context raises."""
    return [_in_turn(original(*args, **kwargs))]


@contextlib.contextmanager
def _in_turn(contexts: Sequence[Any]) -> Iterator[None]:
    """Let one thread in at a time, because the library sets the process's default dtype."""
    with constructing(), contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _get_device_map(
    session: FromPretrainedSession,
    original: Any,
    model: Any,
    device_map: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Expand nested paths in a device map, so that accelerate can dispatch the model."""
    result = original(model, device_map, *args, **kwargs)
    is_map = result is not None and not isinstance(device_map, str)
    return expanded(model, result) if is_map else result


def _with_adapter(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Prove the model before the library adds the adapter, which renames its tensors."""
    session = CURRENT_SESSION.get()
    if session is not None and session.model is model:
        session.report_and_audit(model)
    return with_hooks("peft")(original, model, *args, **kwargs)


def _initialize_missing_keys(
    session: FromPretrainedSession, original: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    result = original(model, *args, **kwargs)
    if session.initialises_missing:
        session.construct_unwritten(model)
    return result


def _device_types(device_map: Any) -> set[str]:
    """Return the device types in a map, or the name of a strategy."""
    devices = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    return {str(device).partition(":")[0] for device in devices}


def _is_sharded_by_others() -> bool:
    zero3: Any = deepspeed.is_deepspeed_zero3_enabled
    fsdp: Any = modeling_utils.is_fsdp_enabled  # type: ignore[attr-defined]
    return bool(zero3() or fsdp())
