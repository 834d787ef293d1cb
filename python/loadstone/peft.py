"""PEFT: adapters of offloaded layers get real memory on the device where the layer runs.

>>> with loadstone.patch("peft"):
...     model.load_adapter("lora")              # model.add_adapter, pipe.load_lora_weights ...

PEFT puts an adapter on the device of its layer's weight. If accelerate has offloaded the layer,
that is torch's meta device, and the adapter would silently lose its values. Calls of
:func:`loadstone.transformers.from_pretrained` and the patches for ``"transformers"`` and
``"diffusers"`` include the patch for PEFT. See ``docs/patch.md``.
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
    from loadstone._adapters.peft import hooks  # imported here, because PEFT may be absent

    return hooks.hooks()
