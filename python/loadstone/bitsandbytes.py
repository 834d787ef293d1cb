"""bitsandbytes: make a quantized weight keep its scales when it is moved.

bitsandbytes moves the scales of a weight separately from its bytes, and copies of the weight share
the scales, so offloading a model destroys the only scales. See ``docs/bitsandbytes.md``.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch

from loadstone._adapters.bitsandbytes import patching
from loadstone._adapters.bitsandbytes.experts import rebuild_experts as rebuild_experts
from loadstone._adapters.bitsandbytes.modules import heal_all
from loadstone._adapters.bitsandbytes.modules import rebuild_module as rebuild_module
from loadstone._adapters.bitsandbytes.parameters import Int8Params as Int8Params
from loadstone._adapters.bitsandbytes.parameters import Params4bit as Params4bit
from loadstone._adapters.bitsandbytes.quantized_weight import QuantizedWeight
from loadstone._adapters.patch import Hooks
from loadstone._base.errors import new_error

__all__ = ["QuantizedWeight", "heal"]

_Model = TypeVar("_Model")


def heal(model: _Model) -> _Model:
    """Make quantized weights keep their scales when they are moved, copied, offloaded or saved.

    >>> model = loadstone.bitsandbytes.heal(model)
    >>> accelerate.cpu_offload(model, execution_device="cuda")

    Modules and weights stay the same objects; their class becomes a subclass. This includes weights
    that are quantized later, and a second call has no effect. Call it before a model is moved or
    offloaded. If accelerate has already offloaded the model, the hooks must still have access to
    all components.

    Args:
        model: an ``nn.Module``, or a pipeline of diffusers (an object with ``components``).

    Returns:
        The same model.

    Raises:
        FormatError: scales are lost already (``q.scale_missing``); the error names the first
            weight, and the model is unchanged.
        OptionError: ``plan.options``: the argument is neither a module nor a pipeline.

    Not thread-safe while the model runs.
    """
    heal_all({"": model} if isinstance(model, torch.nn.Module) else _components(model))
    return model


def _components(pipeline: Any) -> dict[str, torch.nn.Module]:
    components = getattr(pipeline, "components", None)
    if not isinstance(components, dict):
        raise new_error(
            "plan.options",
            "the model must be a torch.nn.Module or a pipeline",
            field="model",
            found=type(pipeline).__name__,
        )
    return {name: part for name, part in components.items() if isinstance(part, torch.nn.Module)}


@functools.cache
def patches() -> Hooks:
    """Return the hooks that :func:`loadstone.patch` installs for bitsandbytes."""
    return patching.hooks()
