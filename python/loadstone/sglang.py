"""SGLang: the option ``--model-loader-extra-config '{"loadstone": {}}'``.

SGLang finds :func:`register` in each of its processes, as the entry point ``loadstone`` of
``sglang.srt.plugins``. Its list of load formats cannot be extended, so an option selects the
loader. Without the option nothing changes. See docs/how-to/sglang.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loadstone._adapters.sites.sglang import SITES

__all__ = ["register"]

OPTION = "loadstone"
_TARGET = "sglang.srt.model_loader.loader.get_model_loader"


def register() -> None:
    """Hook the function in which SGLang chooses a loader."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_TARGET, choose, HookType.AROUND)


def choose(
    otherwise: Callable[..., Any], load_config: Any, model_config: Any = None, **others: Any
) -> Any:
    """Return the loader for a config: loadstone's if the config has loadstone's option.

    Raises:
        RuntimeError: the option is set, but this release of SGLang is unsupported; the message
            names the missing parts.
    """
    if OPTION not in (load_config.model_loader_extra_config or {}):
        return otherwise(load_config, model_config, **others)
    if SITES.lacking():
        raise RuntimeError(SITES.refusal())
    from loadstone._adapters.serving.sglang.loader import LoadstoneLoader

    return LoadstoneLoader(load_config)
