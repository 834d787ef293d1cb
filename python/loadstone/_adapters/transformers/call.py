from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from loadstone._adapters.patch import Hook, wrap_if_active
from loadstone._adapters.transformers.from_pretrained_call import FromPretrainedCall
from loadstone._base.errors import make
from loadstone._files.catalog import try_inspect
from loadstone._model.ranks import shard_of

# Owner, name and replacement, which takes the load, the library's function and its arguments.
Place = tuple[Any, str, Callable[..., Any]]

CURRENT: ContextVar[FromPretrainedCall | None] = ContextVar(
    "loadstone_transformers_load", default=None
)


def hooks_of_loads(places: Iterable[Place]) -> list[Hook]:
    """Return hooks that run inside a load; outside, the library's own functions run."""
    return [
        Hook(owner, name, wrap_if_active("transformers", functools.partial(_in_load, replacement)))
        for owner, name, replacement in places
    ]


def _in_load(replacement: Callable[..., Any], original: Any, *args: Any, **kwargs: Any) -> Any:
    load = CURRENT.get()
    if load is None:
        return original(*args, **kwargs)
    return replacement(load, original, *args, **kwargs)


@contextlib.contextmanager
def constructing_in(load: FromPretrainedCall) -> Iterator[None]:
    """Protect torch's random state: the library's construction on meta must not draw from it."""
    load.is_constructing = True
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        load.is_constructing = False


def reason_against(
    model: Any, state_dict: Any, files: list[str] | None, device_mesh: Any
) -> str | None:
    """Return why loadstone does not load this checkpoint; ``None`` if it does."""
    if state_dict is not None:
        return "state_dict"
    if not files:
        return "no checkpoint files"
    other = next((file for file in files if not str(file).endswith(".safetensors")), None)
    if other is not None and (reason := try_inspect(files, allow_links=True)[1]):
        return f"a file that loadstone does not read ({reason})"
    if getattr(model, "_pp_stage", None) is not None:
        return "distributed_config"
    if device_mesh is not None and not holds_slices(model):
        return "distributed_config"
    if any(name.endswith("_extra_state") for name in model.state_dict()):
        return "extra state of modules"
    return None


def holds_slices(model: Any) -> bool:
    """Return whether the model is sharded over ranks, and loadstone can read every shard."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    shards = [shard for shard in map(shard_of, tensors) if shard is not None]
    return bool(shards) and not any(shard.obstacle for shard in shards)


def refused(what: str) -> Exception:
    return make(
        "plan.options",
        "this load is not supported: call the model class's own from_pretrained",
        field=what,
    )
