"""Initialise missing parameters with the model's own initialisers.

A module's ``reset_parameters`` runs on a stand-in of the whole model, in which only this module's
parameters have memory, so the model and its loaded values stay unchanged. Other tensors are on meta
there: initialising them costs nothing and draws nothing, and reading them fails. So only the
modules that lack a tensor use the random generator, in the model's order.

A parameter that no initialiser writes gets the constructor's value if an adapter can build the
model again; else the plan rejects it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from loadstone import _core
from loadstone._base.dtypes import torch_dtype
from loadstone._base.errors import make
from loadstone._model.modules import owner_of, submodule
from loadstone._model.targets import PlannedTarget
from loadstone._skeleton import stand_in
from loadstone._skeleton.constructor import find_builder, parameter_values


def findings(targets: Iterable[PlannedTarget], model: Any) -> list[_core.Finding]:
    missing = [target for target in targets if target.origin == "initialiser"]
    problems = [_of_slice(target.name) for target in missing if target.slice_begin]
    bare = [
        target.name
        for target in missing
        if not target.slice_begin and not _has_initialiser(model, target.name)
    ]
    known = _constructed(model, bare)
    for name in bare:
        if name not in known:
            owner, _, leaf = name.rpartition(".")
            problems.append(
                _core.Finding(
                    "error",
                    "plan.no_initialiser",
                    name,
                    [],
                    f"'{name}' is missing and its module "
                    f"({type(submodule(model, owner)).__name__}) has no reset_parameters()",
                    f"put {leaf} into the checkpoint, or choose missing='zeros'",
                )
            )
    return problems


def _of_slice(name: str) -> _core.Finding:
    message = f"'{name}' is missing, and this rank holds a slice: initialisers make whole tensors"
    hint = "choose missing='zeros', and initialise this tensor after the load"
    return _core.Finding("error", "plan.no_initialiser", name, [], message, hint)


def values(targets: Sequence[PlannedTarget], model: Any) -> dict[int, Any]:
    wanted: dict[str, dict[str, int]] = {}
    for index, target in enumerate(targets):
        if target.origin == "initialiser":
            owner, _, leaf = target.name.rpartition(".")
            wanted.setdefault(owner, {})[leaf] = index
    if not wanted:
        return {}
    made: dict[int, Any] = {}
    initialisers = _Initialisers(model)
    for owner, leaves in wanted.items():
        if _has_initialiser(model, f"{owner}." if owner else ""):
            fresh = initialisers.run(owner)
            made |= {
                i: fresh[leaf]
                for leaf, i in leaves.items()
                if leaf in fresh and not _is_unwritten(fresh[leaf])
            }
    rest = [i for leaves in wanted.values() for i in leaves.values() if i not in made]
    known = _constructed(model, (targets[index].name for index in rest))
    for index in rest:
        name = targets[index].name
        if name not in known:
            raise make(
                "plan.no_initialiser", "reset_parameters() left it without a value", tensor=name
            )
        made[index] = known[name]
    return {
        index: value.to(targets[index].device, torch_dtype(targets[index].dtype))
        for index, value in made.items()
    }


def _has_initialiser(model: Any, name: str) -> bool:
    return callable(getattr(owner_of(model, name), "reset_parameters", None))


def _constructed(model: Any, names: Iterable[str]) -> dict[str, Any]:
    wanted = list(names)
    build = find_builder(model) if wanted else None
    return {} if build is None else parameter_values(build, wanted)


class _Initialisers:
    def __init__(self, model: Any) -> None:
        self.model = model
        self._stand_in: Any = None

    def run(self, owner: str) -> dict[str, Any]:
        """Return the parameters that a module's initialiser makes, on the CPU."""
        real = submodule(self.model, owner)
        fresh = {}
        for name, old in real._parameters.items():
            if old is not None:
                data = torch.full(old.shape, _sentinel(old.dtype), dtype=old.dtype, device="cpu")
                fresh[name] = torch.nn.Parameter(data, requires_grad=old.requires_grad)
        try:
            if self._stand_in is None:
                self._stand_in = stand_in.stand_in(self.model)
            module = submodule(self._stand_in, owner)
            with stand_in.temporary_memory(module, real, fresh), stand_in.WriteGuard(self.model):
                module.reset_parameters()
                made = {name: module._parameters.get(name) for name in fresh}
        except Exception as error:
            raise make(
                "plan.no_initialiser",
                f"reset_parameters() of {type(real).__name__} cannot make its missing tensors: "
                f"{type(error).__name__}: {error}",
                tensor=owner,
            ) from error
        return {name: value.detach() for name, value in made.items() if value is not None}


def _sentinel(dtype: Any) -> float | int:
    return float("nan") if dtype.is_floating_point or dtype.is_complex else 0


def _is_unwritten(value: Any) -> bool:
    return bool(value.is_floating_point() and value.isnan().any())
