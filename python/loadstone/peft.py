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

from loadstone._adapters.patch import Hooks

__all__: list[str] = []


@functools.cache
def patches() -> Hooks:
    """Return the hooks that :func:`loadstone.patch` installs for PEFT.

    Raises:
        OptionError: ``plan.options``: an unsupported release of PEFT.
    """
    from loadstone._adapters.peft import hooks  # PEFT may be absent

    return hooks.hooks()
