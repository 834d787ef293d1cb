"""Values for missing parameters from the model's own initialisers, never from a guess.

A module's ``reset_parameters`` runs on a stand-in of the module with fresh memory, so that nothing
that the load put into the real module is touched. A parameter whose module has none is refused by
the plan.
"""

from __future__ import annotations

import copy
from typing import Any

from loadstone import _core
from loadstone._errors import make
from loadstone._plan import Plan


def findings(core: _core.Plan, model: Any) -> list[_core.Finding]:
    """One error for each missing tensor that no initialiser of the model can make."""
    problems = []
    for row in core.targets():
        if row["origin"] != "initialiser":
            continue
        owner, _, leaf = row["name"].rpartition(".")
        if not callable(getattr(model.get_submodule(owner), "reset_parameters", None)):
            problems.append(
                _core.Finding(
                    "error",
                    "plan.no_initialiser",
                    row["name"],
                    [],
                    f"'{row['name']}' is missing and its module "
                    f"({type(model.get_submodule(owner)).__name__}) has no reset_parameters()",
                    f"put {leaf} into the checkpoint, or choose missing='zeros'",
                )
            )
    return problems


def values(plan: Plan, model: Any) -> dict[int, Any]:
    """Index into ``plan.targets`` and tensor, for every target of origin ``initialiser``."""
    wanted: dict[str, dict[str, int]] = {}
    for index, target in enumerate(plan.targets):
        if target.origin == "initialiser":
            owner, _, leaf = target.name.rpartition(".")
            wanted.setdefault(owner, {})[leaf] = index
    made: dict[int, Any] = {}
    for owner, leaves in wanted.items():
        fresh = _initialised(model.get_submodule(owner))
        for leaf, index in leaves.items():
            target = plan.targets[index]
            made[index] = _checked(fresh, owner, leaf).to(target.device, _dtype(target.dtype))
    return made


def _initialised(module: Any) -> dict[str, Any]:
    """The parameters that the module's initialiser makes, on the CPU."""
    import torch

    stand_in = copy.copy(module)
    stand_in.__dict__ = dict(module.__dict__)
    fresh = {}
    for name, old in module._parameters.items():
        if old is not None:
            data = torch.full(old.shape, _sentinel(old.dtype), dtype=old.dtype, device="cpu")
            fresh[name] = torch.nn.Parameter(data, requires_grad=old.requires_grad)
    absent = dict.fromkeys(name for name in module._parameters if name not in fresh)
    stand_in.__dict__["_parameters"] = fresh | absent
    stand_in.reset_parameters()
    return {name: parameter.detach() for name, parameter in fresh.items()}


def _sentinel(dtype: Any) -> float | int:
    return float("nan") if dtype.is_floating_point or dtype.is_complex else 0


def _checked(fresh: dict[str, Any], owner: str, leaf: str) -> Any:
    """A floating parameter that still holds the sentinel was not written by the initialiser."""
    value = fresh[leaf]
    if value.is_floating_point() and bool(value.isnan().any()):
        raise make(
            "plan.no_initialiser",
            "reset_parameters() left it without a value",
            tensor=f"{owner}.{leaf}" if owner else leaf,
        )
    return value


def _dtype(name: str) -> Any:
    from loadstone._dtypes import torch_dtype

    return torch_dtype(name)
