"""``Accelerator.prepare`` with FSDP2 and a model on meta: a skeleton, which is loaded afterwards.

Two things of accelerate concern models that hold memory. It knows parameters of an optimizer again
by the addresses of their memory, and all those on meta have the same one: the optimizer would train
the last parameter alone, without a word. With ``cpu_ram_efficient_loading`` the first rank sends
its values to the others; on meta it has none, and the others wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from loadstone._base.errors import make

# What a rank says of the parameters of a model.
_ALL, _SOME, _NONE = "all", "some", "none"


def prepare(original: Callable[..., Any], accelerator: Any, *args: Any, **options: Any) -> Any:
    """``Accelerator.prepare``: a skeleton is sharded as it is, and its optimizer stays its own."""
    models = [each for each in args if isinstance(each, torch.nn.Module)]
    # Lacks the attribute after `AcceleratorState._reset_state()`, which accelerate then explains.
    if not models or not getattr(accelerator, "is_fsdp2", False):
        return original(accelerator, *args, **options)
    with _sends_no_skeleton(accelerator.state.fsdp_plugin, models), _told_apart(models):
        return original(accelerator, *args, **options)


@contextlib.contextmanager
def _sends_no_skeleton(plugin: Any, models: list[torch.nn.Module]) -> Iterator[None]:
    """Without ``cpu_ram_efficient_loading`` where the ranks have skeletons."""
    if not plugin.cpu_ram_efficient_loading or not _are_skeletons(models):
        yield
        return
    plugin.cpu_ram_efficient_loading = False
    try:
        yield
    finally:
        plugin.cpu_ram_efficient_loading = True


def _are_skeletons(models: list[torch.nn.Module]) -> bool:
    """Whether all ranks have their parameters on meta; asks them.

    Ranks behind the first may be on meta while it has values, which accelerate sends them.

    Raises:
        PlanError: the first rank, or another one, lacks a part of the values (``plan.no_value``).
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
    """Parameters on meta have addresses of their own: those of the objects, which memory lacks."""
    marked = [part for part in _parts(models) if part.is_meta]
    for part in marked:
        part.data_ptr = _Address(id(part))
    try:
        yield
    finally:
        for part in [*marked, *_parts(models)]:  # what FSDP ignores stays, and gets a value later
            if isinstance(part.__dict__.get("data_ptr"), _Address):
                del part.data_ptr


class _Address(int):
    """Stands for ``data_ptr``."""

    def __call__(self) -> int:
        return int(self)


def _parts(models: list[torch.nn.Module]) -> Iterator[Any]:
    """What accelerate asks for an address: of a parameter that is spread over ranks its part."""
    for model in models:
        for parameter in model.parameters():
            yield getattr(parameter, "_local_tensor", parameter)
