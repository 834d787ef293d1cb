"""Initialise missing parameters with the model's own initialisers.

A module's ``reset_parameters`` runs on a stand-in of the whole model, in which only this module's
parameters have memory, so the model and its loaded values stay unchanged. All other tensors of the
stand-in are on meta: initialising them costs nothing and draws nothing, and reading them fails. So
only the modules that lack a tensor use the random generator, in the model's order.

A parameter that no initialiser writes to gets the constructor's value if an adapter can build the
model again; otherwise the plan rejects it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from loadstone import _core
from loadstone._base.dtypes import torch_dtype
from loadstone._base.errors import new_error
from loadstone._base.names import join_name, parent_name
from loadstone._model.modules import owner_of, submodule
from loadstone._model.targets import PlannedTarget
from loadstone._skeleton import stand_in
from loadstone._skeleton.constructor import find_builder, parameter_values
from loadstone._skeleton.unwritten import fill_value, is_unwritten


def findings(targets: Iterable[PlannedTarget], model: Any) -> list[_core.Finding]:
    missing = [target for target in targets if target.origin == "initialiser"]
    whole_names = [target.name for target in missing if not target.slice_begin]
    bare = [name for name in whole_names if not _has_initialiser(owner_of(model, name))]
    constructed = _constructed_values(model, bare)
    return [
        *(_slice_finding(target.name) for target in missing if target.slice_begin),
        *(_bare_finding(model, name) for name in bare if name not in constructed),
    ]


def _slice_finding(name: str) -> _core.Finding:
    message = (
        f"'{name}' is missing, and this rank has only a slice of it, but initialisers can fill "
        "only whole tensors"
    )
    hint = "choose missing='zeros', and initialise this tensor after the load"
    return _core.Finding("error", "plan.no_initialiser", name, [], message, hint)


def _bare_finding(model: Any, name: str) -> _core.Finding:
    module = type(owner_of(model, name)).__name__
    message = f"'{name}' is missing and its module ({module}) has no reset_parameters()"
    leaf = name.rpartition(".")[2]
    hint = f"put {leaf} into the checkpoint, or choose missing='zeros'"
    return _core.Finding("error", "plan.no_initialiser", name, [], message, hint)


def values(targets: Sequence[PlannedTarget], model: Any) -> dict[int, Any]:
    """Return the missing tensors that initialisers and constructors make, by index."""
    missing = {
        target.name: index for index, target in enumerate(targets) if target.origin == "initialiser"
    }
    if not missing:
        return {}
    tensors: dict[str, Any] = {}
    initialisers = _Initialisers(model)
    for owner in dict.fromkeys(parent_name(name) for name in missing):
        if _has_initialiser(submodule(model, owner)):
            for name, value in initialisers.run(owner).items():
                if name in missing and not is_unwritten(value):
                    tensors[name] = value
    rest = [name for name in missing if name not in tensors]
    tensors |= (constructed := _constructed_values(model, rest))
    for name in rest:
        if name not in constructed:
            message = "reset_parameters() left it without a value"
            raise new_error("plan.no_initialiser", message, tensor=name)
    return {
        index: tensors[name].to(targets[index].device, torch_dtype(targets[index].dtype))
        for name, index in missing.items()
    }


def _has_initialiser(module: Any) -> bool:
    return callable(getattr(module, "reset_parameters", None))


def _constructed_values(model: Any, names: Sequence[str]) -> dict[str, Any]:
    build = find_builder(model) if names else None
    return {} if build is None else parameter_values(build, names)


class _Initialisers:
    def __init__(self, model: Any) -> None:
        self.model = model
        self._stand_in: Any = None

    def run(self, owner: str) -> dict[str, Any]:
        """Return the parameters that a module's initialiser makes, by full name, on the CPU."""
        real = submodule(self.model, owner)
        fresh = {}
        for name, parameter in real._parameters.items():
            if parameter is not None:
                shape, dtype = parameter.shape, parameter.dtype
                data = torch.full(shape, fill_value(dtype), dtype=dtype, device="cpu")
                fresh[name] = torch.nn.Parameter(data, requires_grad=parameter.requires_grad)
        try:
            if self._stand_in is None:
                self._stand_in = stand_in.stand_in(self.model)
            module = submodule(self._stand_in, owner)
            with stand_in.temporary_memory(module, real, fresh), stand_in.WriteGuard(self.model):
                module.reset_parameters()
                parameters = dict(module._parameters)
        except Exception as error:
            raise new_error(
                "plan.no_initialiser",
                f"reset_parameters() of {type(real).__name__} cannot make its missing tensors: "
                f"{type(error).__name__}: {error}",
                tensor=owner,
            ) from error
        return {
            join_name(owner, name): parameter.detach()
            for name, parameter in parameters.items()
            if name in fresh and parameter is not None
        }
