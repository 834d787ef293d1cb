"""Hooks on the library's ``from_pretrained``.

They replace the construction of the model (by a skeleton with real buffers), the reading of the
checkpoint, and the allocation of missing tensors (the library's own overwrites every non-persistent
buffer with uninitialized memory). The library's code does everything else.
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
    with_hooks_of,
    wrap_if_active,
)
from loadstone._adapters.sites.transformers import SITES
from loadstone._adapters.transformers.call import CURRENT, hooks_of_loads, refused
from loadstone._adapters.transformers.from_pretrained_call import DEFAULTS, FromPretrainedCall
from loadstone._base.keywords import refuse_misspelled
from loadstone._base.torch_modes import construct, constructing, ordinary_tensors, wrap_always
from loadstone._plan.options import NAMES
from loadstone._plan.placement import expanded

# The module of the installed release; the other one imports names that the release lacks.
if SITES.is_since("5.0"):
    from loadstone._adapters.transformers import v5
    from loadstone._adapters.transformers.load import V5Call

    RELEASE: ModuleType = v5
    Call: type[FromPretrainedCall] = V5Call
else:
    from loadstone._adapters.transformers import v4

    RELEASE = v4
    Call = v4.V4Call

OPTIONS = ContextVar("loadstone_transformers_options", default=DEFAULTS)

# Arguments that request a different kind of load.
_OTHER_WAYS = ("state_dict", "gguf_file")
# These too, except in releases that make DTensors of them, which the model shows later.
_OF_RANKS = ("tp_plan", "tp_size", "distributed_config", "device_mesh")


@functools.cache
def hooks() -> Hooks:
    adapters = wrap_if_active("transformers", _with_adapters)
    places = [
        (PreTrainedModel, "_initialize_missing_keys", _initialize_missing_keys),
        (modeling_utils, "_get_device_map", _get_device_map),
    ]
    of_release = RELEASE.hooks()
    return Hooks(
        [
            Hook(
                PreTrainedModel, "from_pretrained", wrap_if_active("transformers", _from_pretrained)
            ),
            *(Hook(PeftAdapterMixin, name, adapters) for name in ("load_adapter", "add_adapter")),
            *hooks_of_loads(places),
            *of_release,
            Hook(PreTrainedModel, "get_init_context", wrap_always(_one_context)),
            Hook(PreTrainedModel, "_from_config", wrap_always(construct)),
        ],
        "transformers",
        of_release.late,
    )


def _config_fields(cls: Any, folder: Any = None) -> Iterable[str]:
    """Return the names in a folder's config.json, which a config class may not declare."""
    with contextlib.suppress(Exception):  # the library reports errors of the folder
        return [*cls.config_class.get_config_dict(folder)[0]]
    return ()


def _from_pretrained(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    chosen = OPTIONS.get()
    if chosen.refuses_unsupported:
        given = kwargs.get("config")
        config = given if hasattr(given, "attribute_map") else cls.config_class
        aliases = getattr(config, "attribute_map", {})
        fields = functools.partial(_config_fields, cls, *args[:1])
        refuse_misspelled(kwargs, [*NAMES, *aliases], (original, cls), config, fields)
    ways = _OTHER_WAYS if RELEASE.MAKES_DTENSORS else (*_OTHER_WAYS, *_OF_RANKS)
    other = [name for name in ways if kwargs.get(name) is not None]
    if _is_sharded_by_others():
        other.append("DeepSpeed or FSDP")
    places = _places(kwargs.get("device_map"))
    if "meta" in places and len(places) > 1:
        other.append("device_map (meta beside other devices)")
    hooks().refresh()
    if other and chosen.refuses_unsupported:
        raise refused(other[0])
    if other or places == {"meta"}:  # the caller wants the model on meta
        with suspended("transformers"):
            return original(cls, *args, **kwargs)
    with ordinary_tensors(), set_variable(CURRENT, Call(chosen)) as load:
        result = original(cls, *args, **kwargs)
        load.finish(result[0] if isinstance(result, tuple) else result)
    return result


def _one_context(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Combine all contexts: the library does not exit them if a later one raises."""
    return [_entered_in_turn(original(*args, **kwargs))]


@contextlib.contextmanager
def _entered_in_turn(contexts: Sequence[Any]) -> Iterator[None]:
    """Let one thread in at a time: the library sets torch's default dtype for the process."""
    with constructing(), contextlib.ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


def _get_device_map(
    load: FromPretrainedCall, original: Any, model: Any, device_map: Any, *args: Any, **kwargs: Any
) -> Any:
    """Expand nested paths in a map, so that accelerate can dispatch it."""
    found = original(model, device_map, *args, **kwargs)
    is_map = found is not None and not isinstance(device_map, str)
    return expanded(model, found) if is_map else found


def _with_adapters(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Prove the model before the library adds the adapter, which renames its tensors."""
    load = CURRENT.get()
    if load is not None and load.model is model:
        load.finish(model)
    return with_hooks_of("peft")(original, model, *args, **kwargs)


def _initialize_missing_keys(
    load: FromPretrainedCall, original: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    result = original(model, *args, **kwargs)
    if load.initialises_missing:
        load.construct_unwritten(model)
    return result


def _places(device_map: Any) -> set[str]:
    """Return the device types in a map, or the name of a strategy."""
    named = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    return {str(each).partition(":")[0] for each in named}


def _is_sharded_by_others() -> bool:
    zero3: Any = deepspeed.is_deepspeed_zero3_enabled
    fsdp: Any = modeling_utils.is_fsdp_enabled  # type: ignore[attr-defined]
    return bool(zero3() or fsdp())
