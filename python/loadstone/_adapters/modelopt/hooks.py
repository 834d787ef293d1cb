"""Hooks on ``init_quantized_weights`` of ModelOpt.

ModelOpt builds the model on meta, places the quantizers, and lets accelerate read the checkpoint by
verbatim keys. The hooks replace the construction (by a skeleton), the device map (ModelOpt counts
unpacked experts) and the reading. ModelOpt looks up these three functions in its own module when it
calls them, so the hooks also work if a script imported ``init_quantized_weights`` earlier.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import transformers
from modelopt.torch.quantization.plugins import accelerate as plugin

from loadstone._adapters.modelopt.loading import load_into, resolved
from loadstone._adapters.patch import Hook, Hooks, hooked, set_variable, wrap_if_active
from loadstone._base.errors import unknown_word_error
from loadstone._plan.options import DEFAULTS, LoadOptions
from loadstone._skeleton.constructor import locked_skeleton

LIBRARY = "modelopt"

OPTIONS = ContextVar("loadstone_modelopt_options", default=DEFAULTS)
_capacities: ContextVar[dict[Any, Any] | None] = ContextVar(
    "loadstone_modelopt_capacities", default=None
)

# Arguments of `from_pretrained` that ModelOpt would pass to accelerate.
_OPTIONS = ("device_map", "max_memory", "attn_implementation")
_KNOWN = (*_OPTIONS, "dtype", "torch_dtype", "revision")


@functools.cache
def hooks() -> Hooks:
    replacements: dict[str, Any] = {
        "init_empty_weights": _init_empty_weights,
        "infer_auto_device_map": _infer_auto_device_map,
        "load_checkpoint_and_dispatch": _load_checkpoint_and_dispatch,
        "init_quantized_weights": _init_quantized_weights,
    }
    wrapped = {name: wrap_if_active(LIBRARY, hook) for name, hook in replacements.items()}
    return Hooks([Hook(plugin, name, hook) for name, hook in wrapped.items()], LIBRARY)


@contextlib.contextmanager
def quantizing(options: LoadOptions, *arguments: Any) -> Iterator[None]:
    with hooked(hooks()), set_variable(OPTIONS, options), plugin.init_quantized_weights(*arguments):
        yield


def _init_empty_weights(original: Any, *args: Any, **kwargs: Any) -> Any:
    return locked_skeleton()


def _infer_auto_device_map(original: Any, model: Any, max_memory: Any = None, **_: Any) -> Any:
    """Record only the capacities; the plan computes the map, because it knows packed sizes."""
    _capacities.set(dict(max_memory or {}))
    return {"": "cpu"}


def _load_checkpoint_and_dispatch(
    original: Any, model: Any, checkpoint: Any, device_map: Any = None, **kwargs: Any
) -> Any:
    options = OPTIONS.get()
    capacities = _capacities.get() or {}
    _capacities.set(None)
    if options.device_map is None and any(name != "cpu" for name in capacities):
        sizes = {name: int(size) for name, size in capacities.items()}
        options = replace(options, device_map="auto", max_memory=options.max_memory or sizes)
    for name, value in kwargs.items():
        if name not in _KNOWN and value is not None:
            raise unknown_word_error(name, "argument of this load", name, _KNOWN)
    load_into(model, resolved(checkpoint, kwargs.get("revision")), options)
    return model.eval()


@contextlib.contextmanager
def _init_quantized_weights(original: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Let ``from_pretrained`` also take a device map inside ModelOpt's context manager."""
    auto: Any = transformers.AutoModelForCausalLM
    before = vars(auto).get("from_pretrained")
    try:
        with original(*args, **kwargs):
            library: Any = vars(auto)["from_pretrained"]

            def from_pretrained(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
                changes = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
                if kwargs.get("dtype", kwargs.get("torch_dtype")) == "auto":
                    kwargs.pop("dtype", None), kwargs.pop("torch_dtype", None)
                with set_variable(OPTIONS, replace(OPTIONS.get(), **changes)):
                    return library.__func__(cls, *args, **kwargs)

            auto.from_pretrained = classmethod(functools.wraps(library.__func__)(from_pretrained))
            yield
    finally:
        # ModelOpt replaces the inherited method with a bound method of the class itself.
        if before is None:
            del auto.from_pretrained
        else:
            auto.from_pretrained = before
