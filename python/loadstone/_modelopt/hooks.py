"""Where loadstone enters ModelOpt: its own ``init_quantized_weights``, with another middle.

The library builds the model without memory, places the quantizers, and has accelerate read the
checkpoint by verbatim keys. What is replaced are the building (a skeleton: nothing is allocated),
the device map (the library's counts experts unpacked) and the reading. The first three are found by
the library in its own module when it calls them, so that a script which has imported
``init_quantized_weights`` before is concerned too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from loadstone._errors import make
from loadstone._modelopt.loading import ModelOptOptions, load_into, resolved
from loadstone._patch import Hook, Hooks, gated, held
from loadstone._skeleton_turn import skeleton_in_turn

LIBRARY = "modelopt"

_options: ContextVar[ModelOptOptions | None] = ContextVar(
    "loadstone_modelopt_options", default=None
)
_capacities: ContextVar[dict[Any, Any] | None] = ContextVar(
    "loadstone_modelopt_capacities", default=None
)

# What users say to `from_pretrained` that the library's function would hand to accelerate.
_OURS = ("device_map", "max_memory", "attn_implementation")


@functools.cache
def hooks() -> Hooks:
    """The functions of ModelOpt's plugin that are replaced."""
    from modelopt.torch.quantization.plugins import accelerate as plugin

    ours: dict[str, Any] = {
        "init_empty_weights": _init_empty_weights,
        "infer_auto_device_map": _infer_auto_device_map,
        "load_checkpoint_and_dispatch": _load_checkpoint_and_dispatch,
        "init_quantized_weights": _init_quantized_weights,
    }
    return Hooks([Hook(plugin, name, gated(LIBRARY, each)) for name, each in ours.items()], LIBRARY)


def entered(*args: Any) -> contextlib.AbstractContextManager[None]:
    """The library's ``init_quantized_weights``, hooked or not."""
    from modelopt.torch.quantization.plugins import accelerate as plugin

    found: contextlib.AbstractContextManager[None] = plugin.init_quantized_weights(*args)
    return found


def options(chosen: ModelOptOptions) -> contextlib.AbstractContextManager[Any]:
    """What the loads in here are to do."""
    return held(_options, chosen)


def _init_empty_weights(original: Any, *args: Any, **kwargs: Any) -> Any:
    return skeleton_in_turn()


def _infer_auto_device_map(original: Any, model: Any, max_memory: Any = None, **_: Any) -> Any:
    """The plan makes the map, knowing what each tensor takes; here is what there is room for."""
    _capacities.set(dict(max_memory or {}))
    return {"": "cpu"}


def _load_checkpoint_and_dispatch(
    original: Any, model: Any, checkpoint: Any, device_map: Any = None, **kwargs: Any
) -> Any:
    chosen = _options.get() or ModelOptOptions()
    room = _capacities.get() or {}
    _capacities.set(None)
    if chosen.device_map is None and any(name != "cpu" for name in room):
        sizes = {name: int(size) for name, size in room.items()}
        chosen = replace(chosen, device_map="auto", max_memory=chosen.max_memory or sizes)
    known = {"dtype", "torch_dtype", "revision"}
    for name, value in kwargs.items():
        if name not in known and value is not None:
            raise make("plan.options", "not an argument of this load", field=name)
    load_into(model, resolved(checkpoint, kwargs.get("revision")), chosen)
    return model.eval()


@contextlib.contextmanager
def _init_quantized_weights(original: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    """The library's own, in which ``from_pretrained`` takes a device map too."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    before = vars(auto).get("from_pretrained")
    try:
        with original(*args, **kwargs):
            library: Any = vars(auto)["from_pretrained"]

            def from_pretrained(cls: Any, /, *given: Any, **named: Any) -> Any:
                said = {name: named.pop(name) for name in _OURS if name in named}
                if named.get("dtype", named.get("torch_dtype")) == "auto":
                    named.pop("dtype", None), named.pop("torch_dtype", None)
                with held(_options, replace(_options.get() or ModelOptOptions(), **said)):
                    return library.__func__(cls, *given, **named)

            auto.from_pretrained = classmethod(functools.wraps(library.__func__)(from_pretrained))
            yield
    finally:
        # The library puts a bound method in the place of what the class inherits.
        if before is None:
            del auto.from_pretrained
        else:
            auto.from_pretrained = before
