"""SGLang: ``--model-loader-extra-config '{"loadstone": {}}'``.

SGLang finds :func:`register` by itself, as the entry point ``loadstone`` of ``sglang.srt.plugins``,
in each of its processes. Its load formats are a closed list, so the loader is asked for by an
option. Nothing changes where it is not. See docs/sglang.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loadstone._adapters.sites.sglang import SITES

OPTION = "loadstone"
_TARGET = "sglang.srt.model_loader.loader.get_model_loader"


def register() -> None:
    """Puts a hook around SGLang's choice of a loader."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_TARGET, choose, HookType.AROUND)


def choose(
    otherwise: Callable[..., Any], load_config: Any, model_config: Any = None, **others: Any
) -> Any:
    """The loader for a config: ours if it has our option.

    Raises:
        RuntimeError: ours is asked for, and SGLang is not as it is known; says what it lacks.
    """
    if OPTION not in (load_config.model_loader_extra_config or {}):
        return otherwise(load_config, model_config, **others)
    if SITES.lacking():
        raise RuntimeError(SITES.refusal())
    from loadstone._adapters.serving.sglang.loader import LoadstoneLoader

    return LoadstoneLoader(load_config)
