"""Lets ``Accelerator.prepare`` shard a model on meta with FSDP2, before the load.

accelerate assumes in two places that models have memory. It identifies an optimizer's parameters by
address, but all meta tensors share one: the optimizer would silently train only the last parameter.
With ``cpu_ram_efficient_loading`` the first rank sends its values; on meta it has none, and the
other ranks hang.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from loadstone._base.errors import make

# A rank's parameters that are on meta.
_ALL, _SOME, _NONE = "all", "some", "none"


def prepare(original: Callable[..., Any], accelerator: Any, *args: Any, **options: Any) -> Any:
    models = [each for each in args if isinstance(each, torch.nn.Module)]
    # After `AcceleratorState._reset_state()` the attribute is absent, and accelerate explains why.
    if not models or not getattr(accelerator, "is_fsdp2", False):
        return original(accelerator, *args, **options)
    with _sends_no_skeleton(accelerator.state.fsdp_plugin, models), _told_apart(models):
        return original(accelerator, *args, **options)


@contextlib.contextmanager
def _sends_no_skeleton(plugin: Any, models: list[torch.nn.Module]) -> Iterator[None]:
    if not plugin.cpu_ram_efficient_loading or not _are_skeletons(models):
        yield
        return
    plugin.cpu_ram_efficient_loading = False
    try:
        yield
    finally:
        plugin.cpu_ram_efficient_loading = True


def _are_skeletons(models: list[torch.nn.Module]) -> bool:
    """Ask all ranks; reject models that only partly have values.

    accelerate sends the values of the first rank to the others, which may be on meta.
    """
    names = [name for model in models for name, each in model.named_parameters() if each.is_meta]
    count = sum(1 for model in models for _ in model.parameters())
    own = _NONE if not names else _ALL if len(names) == count else _SOME
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (own, names[:1]))
    first, lacking = told[0]
    if first == _NONE:
        return False
    if all(each == _ALL for each, _ in told):
        return True
    message = (
        "cpu_ram_efficient_loading sends the values of the first rank, where this tensor is on "
        "meta and has none. Leave the whole model on meta on all ranks, and load it afterwards"
    )
    found = ", ".join(f"rank {rank}: {each}" for rank, (each, _) in enumerate(told))
    raise make("plan.no_value", message, tensor=lacking[0], found=f"parameters on meta: {found}")


@contextlib.contextmanager
def _told_apart(models: list[torch.nn.Module]) -> Iterator[None]:
    """Give each meta parameter a distinct address: the id of the object."""
    marked = [part for part in _parts(models) if part.is_meta]
    for part in marked:
        part.data_ptr = _Address(id(part))
    try:
        yield
    finally:
        for part in [*marked, *_parts(models)]:  # parameters that FSDP ignores are not replaced
            if isinstance(part.__dict__.get("data_ptr"), _Address):
                del part.data_ptr


class _Address(int):
    def __call__(self) -> int:
        return int(self)


def _parts(models: list[torch.nn.Module]) -> Iterator[Any]:
    """Yield the tensors whose address accelerate asks for: the local part of sharded parameters."""
    for model in models:
        for parameter in model.parameters():
            yield getattr(parameter, "_local_tensor", parameter)
