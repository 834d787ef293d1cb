"""bitsandbytes: a quantized weight is one unit, wherever it lives.

bitsandbytes moves the scales of a weight apart from its bytes, and shares them between copies; so
whatever offloads a model destroys the only scales there are. See ``docs/bitsandbytes.md``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from loadstone._bitsandbytes import modules, patching
from loadstone._bitsandbytes.unit import Unit
from loadstone._errors import make
from loadstone._patch import Hooks

__all__ = ["Unit", "heal", "patches"]


def heal(model: Any) -> Any:
    """Makes the quantized weights of a model whole: moved, copied, offloaded and saved as one.

    >>> model = loadstone.bitsandbytes.heal(model)
    >>> accelerate.cpu_offload(model, execution_device="cuda")

    The modules and weights stay the objects that they are, and change their class to one that
    derives from it; nothing is changed in bitsandbytes or accelerate. Weights that are quantized
    later are healed too. Doing it again has no effect. To be done before a model is moved or
    offloaded; a model that accelerate has offloaded before is healed where its hooks find
    all parts.

    Args:
        model: an ``nn.Module``, or a pipeline of diffusers: what has ``components``.

    Returns:
        the same model.

    Raises:
        FormatError: scales are gone already (``q.scale_missing``), naming the first weight;
            nothing is changed.

    Thread safety: none while the model runs.
    """
    roots = {"": model} if isinstance(model, torch.nn.Module) else _components(model)
    found = {
        f"{root}.{path}" if root and path else root or path: module
        for root, component in roots.items()
        for path, module in component.named_modules()
        if modules.is_quantized(module) and not modules.is_whole(module)
    }
    broken = [path for path, module in found.items() if modules.problem(module)]
    if broken:
        raise make(
            "q.scale_missing",
            f"the scales of {len(broken)} quantized weights are gone: they were moved to meta "
            "and nothing holds a copy; load the model anew and heal it first",
            tensor=f"{broken[0]}.weight" if broken[0] else "weight",
        )
    for module in found.values():
        modules.make_whole(module)
    return model


def _components(pipeline: Any) -> dict[str, torch.nn.Module]:
    found = getattr(pipeline, "components", None)
    if not isinstance(found, dict):
        raise make(
            "plan.options",
            "neither a module nor a pipeline",
            field="model",
            found=type(pipeline).__name__,
        )
    return {name: each for name, each in found.items() if isinstance(each, torch.nn.Module)}


@functools.cache
def patches() -> Hooks:
    """The hooks of :func:`loadstone.patch`: what bitsandbytes and accelerate touch is healed."""
    return patching.hooks()
