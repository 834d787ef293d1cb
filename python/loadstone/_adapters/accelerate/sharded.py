"""Let ``Accelerator.prepare`` shard a model on meta with FSDP2, before the load.

accelerate assumes in two places that models have memory. It identifies an optimizer's parameters by
address, but all meta tensors share one address, so the optimizer would silently train only the last
parameter. With ``cpu_ram_efficient_loading`` the first rank sends its values; a rank on meta has
none, so the other ranks hang.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from loadstone._base.errors import new_error

# Share of a rank's parameters that is on meta.
_ALL, _SOME, _NONE = "all", "some", "none"


def prepare(original: Callable[..., Any], accelerator: Any, *args: Any, **options: Any) -> Any:
    models = [argument for argument in args if isinstance(argument, torch.nn.Module)]
    # The attribute is absent after `AcceleratorState._reset_state()`; accelerate explains why.
    if not models or not getattr(accelerator, "is_fsdp2", False):
        return original(accelerator, *args, **options)
    plugin = accelerator.state.fsdp_plugin
    with _without_broadcast_from_meta(plugin, models), _distinct_addresses(models):
        return original(accelerator, *args, **options)


@contextlib.contextmanager
def _without_broadcast_from_meta(plugin: Any, models: list[torch.nn.Module]) -> Iterator[None]:
    if not plugin.cpu_ram_efficient_loading or not _are_on_meta(models):
        yield
        return
    plugin.cpu_ram_efficient_loading = False
    try:
        yield
    finally:
        plugin.cpu_ram_efficient_loading = True


def _are_on_meta(models: list[torch.nn.Module]) -> bool:
    """Return ``True`` if all ranks are entirely on meta, ``False`` if the first rank has values.

    Reject other combinations, because accelerate sends the values of the first rank to the others.
    """
    parameters = [pair for model in models for pair in model.named_parameters()]
    names = [name for name, parameter in parameters if parameter.is_meta]
    meta_share = _NONE if not names else _ALL if len(names) == len(parameters) else _SOME
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (meta_share, names[:1]))
    first, first_names = ranks[0]
    if first == _NONE:
        return False
    if all(state == _ALL for state, _ in ranks):
        return True
    message = (
        "cpu_ram_efficient_loading sends the values of the first rank, where this tensor is on "
        "meta and has no value. Leave the whole model on meta on all ranks, and load it afterwards"
    )
    states = ", ".join(f"rank {rank}: {state}" for rank, (state, _) in enumerate(ranks))
    found = f"parameters on meta: {states}"
    raise new_error("plan.no_value", message, tensor=first_names[0], found=found)


@contextlib.contextmanager
def _distinct_addresses(models: list[torch.nn.Module]) -> Iterator[None]:
    """Give each meta parameter a distinct address, the ``id`` of the tensor."""
    marked = [tensor for tensor in _local_tensors(models) if tensor.is_meta]
    for tensor in marked:
        tensor.data_ptr = _Address(id(tensor))
    try:
        yield
    finally:
        # FSDP does not replace parameters that it ignores, so these still have an ``_Address``.
        for tensor in [*marked, *_local_tensors(models)]:
            if isinstance(tensor.__dict__.get("data_ptr"), _Address):
                del tensor.data_ptr


class _Address(int):
    def __call__(self) -> int:
        return int(self)


def _local_tensors(models: list[torch.nn.Module]) -> Iterator[Any]:
    """Yield the tensors whose address accelerate asks for: the local part of sharded parameters."""
    for model in models:
        for parameter in model.parameters():
            yield getattr(parameter, "_local_tensor", parameter)
