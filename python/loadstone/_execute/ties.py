"""Ties of a model after a load: the library's list of ties, and tied names with two values."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from loadstone import _core
from loadstone._base.adapters import adapters_with
from loadstone._base.warn import users_level, warn
from loadstone._model.model_lock import slots_of
from loadstone._model.targets import PlannedTarget
from loadstone._model.walk import TensorSlot
from loadstone._plan.planned_load import PlannedLoad
from loadstone._plan.ties import is_split


def unlist_ties(model: Any, names: Sequence[str]) -> None:
    """Remove split names from the library's list of ties, so that the library does not tie them."""
    tied = _listed(model)
    for name in names:
        tied.pop(name, None)


def _listed(model: Any) -> dict[str, str]:
    """Return the list of ties of the model's library; a new dict if the model has none."""
    attributes = (adapter.tie_list for adapter in adapters_with("tie_list").values())
    lists = (getattr(model, attribute, None) for attribute in attributes)
    return next((listed for listed in lists if isinstance(listed, dict)), {})


def follow_plan(model: Any, plan: PlannedLoad, ties: Mapping[str, str]) -> None:
    """Make the library tie the names that the plan ties; warn of names that adapters split."""
    untied = [
        target.name for target in plan.targets if target.name in ties and target.origin != "tie"
    ]
    unbind(model, untied)
    listed = _listed(model)
    for target in plan.targets:
        if (
            target.origin == "tie"
            and ties.get(target.name) != target.tie_of
            and target.name in listed
        ):
            listed[target.name] = target.tie_of
    for finding in plan.findings:
        if finding.code == "merge.tie" and finding.severity == "warning":
            warn(finding.message, UserWarning, stacklevel=users_level())


def unbind(model: Any, names: Sequence[str], different: Sequence[str] = ()) -> None:
    """Remove ties from the library's list.

    A LoRA adapter untied the ``names``, so the config must declare no tie either. The names in
    ``different`` have separate values in the checkpoint.
    """
    unlist_ties(model, [*names, *different])
    if names and _tying(getattr(model, "config", None)):
        for config, option in _tying(_own_config(model)):
            with contextlib.suppress(AttributeError, TypeError):
                setattr(config, option, False)


def _tying(config: Any) -> list[tuple[Any, str]]:
    """Return the config and its text part, if they declare ties, with the name of the option."""
    configs = (config, getattr(config, "text_config", None))
    options = [adapter.tie_option for adapter in adapters_with("tie_option").values()]
    return [
        (part, option) for part in configs for option in options if getattr(part, option, False)
    ]


def _own_config(model: Any) -> Any:
    """Give the model's modules a copy of its config, which other models may share."""
    old = model.config
    new = copy.deepcopy(old)
    copies = {id(old): new}
    for name, part in vars(old).items():
        if hasattr(part, "to_dict"):
            copies[id(part)] = getattr(new, name)
    for module in (model, *getattr(model, "modules", list)()):
        config = copies.get(id(vars(module).get("config")))
        if config is not None:
            module.config = config
    return new


def restore(model: Any, untied: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Tie the names in ``untied`` again if both values are equal; warn once of the other names.

    Returns:
        The names that are tied again, with their roots, and the names that stay separate, because
        their values differ or are not in memory to compare.
    """
    slots = {slot.name: slot for slot in slots_of(model)}
    equal: dict[str, str] = {}
    different: list[str] = []
    elsewhere: list[str] = []
    for name, root in untied.items():
        first, second = slots[root].tensor, slots[name].tensor
        if first is second:
            continue
        if first.is_meta or second.is_meta:
            elsewhere.append(name)
        elif first.device == second.device and torch.equal(first, second):
            slots[name].replace(first)
            equal[name] = root
        else:
            different.append(name)
    if different:
        named = ", ".join(f"{name} (tied to {untied[name]})" for name in different)
        warn(
            "the checkpoint contains different values for tied tensors, so loadstone unties "
            f"them: {named}",
            UserWarning,
            stacklevel=users_level(),
        )
    return equal, different + elsewhere


def warn_of_ties(findings: Iterable[_core.Finding], planned: Sequence[_core.Finding]) -> None:
    """Warn of names of one tie that have different values, which only the load detects."""
    known = {(finding.code, finding.message) for finding in planned}
    for finding in findings:
        is_tie = finding.code == "plan.tie" and finding.severity == "warning"
        if is_tie and (finding.code, finding.message) not in known:
            warn(finding.message, UserWarning, stacklevel=users_level())


def split_names(
    model: Any, slots: Sequence[TensorSlot], targets: Sequence[PlannedTarget]
) -> list[str]:
    """Return the names that the plan unties for an adapter.

    A library may list a tie that it did not make, because another thread constructed a model.
    """
    listed = _listed(model)
    return [
        target.name
        for slot, target in zip(slots, targets, strict=True)
        if is_split(slot, target) or (target.name in listed and target.origin != "tie")
    ]
