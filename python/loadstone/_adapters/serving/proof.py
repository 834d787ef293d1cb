"""Check that a server's model code wrote every element of every parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from loadstone._adapters.serving.write_tracking import Unwritten, WriteTracker
from loadstone._base.errors import listed, new_error
from loadstone._base.names import join_name

# Parameters that the constructor computes from the config; no checkpoint contains them.
_CONFIG_PARAMETERS = ("input_scale_ub",)


def require_written(
    model: torch.nn.Module,
    writes: WriteTracker,
    path: str,
    is_exempt: Callable[[str, torch.nn.Module], bool],
) -> None:
    """Raise ``audit.unaccounted`` if a parameter has unwritten elements.

    Empty parameters are exempt, and so are buffers, because the constructor fills them.
    ``is_exempt`` selects modules whose parameters get values elsewhere.
    """
    lacking = [
        (name, parameter, hole)
        for name, parameter in _proved(model, is_exempt)
        if (hole := writes.unwritten(parameter)) is not None
    ]
    if not lacking:
        return
    described = listed(lacking, 4, lambda row: _describe(*row), separator="; ")
    raise new_error(
        "audit.unaccounted",
        f"the checkpoint left parameters of the model without values: {described}",
        path=path,
        tensor=lacking[0][0],
        found=f"{len(lacking)} of {sum(1 for _ in model.parameters())} parameters",
    )


def _proved(
    model: torch.nn.Module, is_exempt: Callable[[str, torch.nn.Module], bool]
) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        if is_exempt(path, module):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if name not in _CONFIG_PARAMETERS and not parameter.is_meta:
                yield join_name(path, name), parameter


def _describe(name: str, parameter: torch.Tensor, hole: Unwritten) -> str:
    if hole.count == parameter.numel():
        return f"'{name}'"
    is_stack = parameter.dim() > 2
    place = f"expert {hole.index[0]}" if is_stack else f"row {hole.index[0]}"
    return f"'{name}' from {place} on ({hole.count} of {parameter.numel()} elements)"
