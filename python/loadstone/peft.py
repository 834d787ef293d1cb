"""PEFT: adapters of models whose layers are offloaded get real memory where the layer runs.

>>> with loadstone.patch("peft"):
...     model.load_adapter("lora")              # model.add_adapter, pipe.load_lora_weights ...

PEFT puts an adapter where the weight of its layer lies. Of a layer that a hook of accelerate's has
offloaded that is torch's meta device, where the adapter would silently lose its values. Calls
of :func:`loadstone.transformers.from_pretrained` and what is patched for ``"transformers"`` and
``"diffusers"`` do this by themselves. See ``docs/patch.md``.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadstone._adapters.patch import Hooks

__all__ = ["patches"]


@functools.cache
def patches() -> Hooks:
    """The hooks that :func:`loadstone.patch` installs for PEFT."""
    from loadstone._adapters.peft import hooks

    return hooks.hooks()


def with_adapters(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of another library's that adds an adapter, with the hooks of this one."""
    from loadstone._adapters.patch import hooked
    from loadstone._adapters.sites import is_known

    if importlib.util.find_spec("peft") is None or not is_known("peft"):
        return original(*args, **kwargs)
    with hooked(patches()):
        return original(*args, **kwargs)
