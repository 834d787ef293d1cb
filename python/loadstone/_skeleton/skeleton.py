"""Build models without memory: parameters on meta, all else as the constructor makes it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch

from loadstone import _core
from loadstone._base import torch_modes
from loadstone._base.dtypes import dtype_name
from loadstone._base.errors import new_error
from loadstone._base.text import write_text
from loadstone._model.model_lock import slots_of
from loadstone._model.modules import named_modules, require_module
from loadstone._model.ranks import LocalShard
from loadstone._model.tensor_memory import storage_key
from loadstone._model.walk import walk
from loadstone._skeleton import modes
from loadstone._skeleton.build import Build
from loadstone._skeleton.finish import facts, finish
from loadstone._skeleton.op_log import StorageView


class skeleton(contextlib.ContextDecorator):  # noqa: N801  (used as a function is)
    """Build modules without memory for their parameters.

    >>> with loadstone.skeleton():
    ...     model = MyModel(config)

    Parameters are on meta: they take no memory, and initialisers cost nothing.
    Buffers and plain tensors are real and have the constructor's values. Ties, views,
    ``requires_grad``, parameter classes and attributes are as in a direct construction. Affects
    only this thread (and, under asyncio, this context). Can be re-entered and nested. Parameters
    over memory from outside the block (a parameter of a different model, a loaded file) are
    unchanged. Parameters that share memory without being one tensor do so until a load gives each
    its own memory; the plan warns of it (``plan.tie``).

    The block always restores torch's default dtype and the states of torch's default generators.
    Both are process-wide: if blocks in several threads overlap, the last block restores them.

    The findings of a plan name the differences from a direct construction: random values, values
    that are unavailable, and tensors that depend on parameters.
    """

    def __init__(self) -> None:
        self._entered: list[tuple[contextlib.ExitStack, Build | None, Build]] = []

    def _recreate_cm(self) -> skeleton:
        return skeleton()  # a decorator enters a new context for each call

    def __enter__(self) -> skeleton:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch_modes.default_dtype.kept())
            stack.enter_context(torch_modes.random_numbers.kept())
            stack.enter_context(torch_modes.ordinary_tensors())
            build = modes.current() or Build()
            self._entered.append((stack.pop_all(), modes.push(build), build))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        stack, before, build = self._entered.pop()
        with stack:
            modes.pop(before)
            if before is build:
                return
            try:
                if kind is None or issubclass(kind, Exception):
                    finish(build, sys._getframe(1))
            finally:
                build.close()


@dataclass
class SkeletonRecord:
    """All differences between a model and its direct construction.

    Attributes:
        findings: findings with these codes:
            ``skeleton.random``: a random value; ``skeleton.uninitialised``: the constructor never
            wrote to the tensor; ``skeleton.not_replayable``: the value is unavailable;
            ``skeleton.derived`` (not a fault): depends on parameters, see :func:`recompute`.
        default_dtype: torch's default dtype when the build began; None: not built by loadstone.
        derived: the tensors that depend on parameters, each with the names of these parameters.
    """

    findings: list[_core.Finding] = field(default_factory=list)
    default_dtype: Any = None
    derived: dict[str, list[str]] = field(default_factory=dict)

    def add(self, severity: str, code: str, target: str, message: str) -> None:
        finding = _core.Finding(severity, f"skeleton.{code}", target, [], message)
        self.findings.append(finding)


# Severity and message for each Fact.code.
_FACTS = {
    "derived": ("info", "the tensor is computed from {}; loadstone computes it again after a load"),
    "not_replayable": ("error", "the constructor's value is not available: {}"),
    "random": (
        "warning",
        "the constructor drew it at random: another construction gives different values",
    ),
    "uninitialised": (
        "warning",
        "the constructor left this memory uninitialised, so the tensor has no value",
    ),
}


def skeleton_record(model: Any) -> SkeletonRecord:
    facts.purge()
    record = SkeletonRecord()
    builds = map(facts.builds.get, model.modules())
    build = next((build for build in builds if build is not None), None)
    if build is not None:
        record.default_dtype = build.default_dtype
        if build.random_read:
            message = "the constructor read a random value"
            record.add("warning", "random", "", message)
    for slot in slots_of(model):
        if slot.kind == "parameter" or slot.tie_of is not None:
            continue
        fact = facts.by_storage.get(storage_key(slot.tensor) or 0)
        if fact is not None:
            reason = fact.reason
            if fact.derivation is not None:
                record.derived[slot.name] = fact.derivation.names(model)
                reason = ", ".join(record.derived[slot.name]) or "parameters"
            severity, message = _FACTS[fact.code]
            if fact.code != "uninitialised" or slot.tensor.numel():
                record.add(severity, fact.code, slot.name, message.format(reason))
        elif build is not None and slot.tensor.is_meta:
            message = "the constructor itself puts it on meta"
            record.add("error", "not_replayable", slot.name, message)
    for path, module in named_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None and torch.nn.parameter.is_lazy(parameter):
                message = "a lazy parameter has no shape before the first forward"
                record.add("error", "not_replayable", f"{path}.{name}".lstrip("."), message)
    return record


def recompute(model: Any, written: Collection[str] = ()) -> list[str]:
    """Recompute the tensors that depend on parameters, except ``written``; return their names.

    Views of a parameter become views of the current parameter. Later loads compute the other
    tensors again.
    """
    facts.purge()
    computed: dict[int, Any] = {}  # new tensors by id of the old tensor
    names = []
    for slot in slots_of(model, refresh=True):
        fact = facts.by_storage.get(storage_key(slot.tensor) or 0)
        if slot.kind == "parameter" or fact is None or fact.derivation is None:
            continue
        if slot.name in written:
            continue
        tensor = computed.get(id(slot.tensor))
        if tensor is None:
            ref = StorageView(slot.tensor, fact.derivation.history)
            with torch.no_grad():
                tensor = computed[id(slot.tensor)] = fact.derivation.compute(ref)
            facts.note_computed(tensor, fact.derivation)
        slot.replace(tensor)
        names.append(slot.name)
    return names


def save_skeleton(model: torch.nn.Module, path: str | os.PathLike[str]) -> None:
    """Write names, shapes, dtypes and kinds of all tensors of a model, for the command.

    Args:
        model: an ``nn.Module``, usually built under :class:`skeleton`.
        path: a JSON file: ``{"targets": [{"name", "shape", "dtype", "kind", "tie_of"}]}``. It omits
            real tensors that the model's state dict lacks and that keep their values.

    Raises:
        OptionError: ``plan.options``: ``model`` is not a module.
        PlanError: ``plan.tensor_class``: a parameter or buffer is of an unknown tensor subclass.
    """
    require_module(model)
    slots = [slot for slot in walk(model) if not slot.may_be_kept]
    for slot in slots:
        if slot.obstacle:
            raise new_error("plan.tensor_class", slot.obstacle, tensor=slot.name)
    targets = [
        {
            "name": slot.name,
            "shape": list(slot.shape),
            "dtype": dtype_name(slot.tensor.dtype),
            "kind": slot.kind,
            "tie_of": slot.tie_of,
        }
        | ({} if slot.shard is None else {"slice": _slice_of(slot.shard, slot.tensor)})
        for slot in slots
    ]
    write_text(path, json.dumps({"targets": targets}, indent=1) + "\n")


def _slice_of(shard: LocalShard, tensor: torch.Tensor) -> dict[str, list[int]]:
    position = {"begin": list(shard.begin), "shape": list(tensor.shape)}
    return position | ({"groups": list(shard.groups)} if shard.groups else {})
