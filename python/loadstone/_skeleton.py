"""Models without memory: parameters on meta, everything else as the constructor makes it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadstone._skeleton_build import Build
    from loadstone._skeleton_walk import TensorSlot


class skeleton(contextlib.ContextDecorator):  # noqa: N801  (used as a function is)
    """Builds modules without memory for their parameters.

    >>> with loadstone.skeleton():
    ...     model = MyModel(config)

    Parameters come to lie on meta: nothing is allocated for them, and initialisers cost nothing.
    Buffers and plain tensors are real and hold what the constructor computes. Ties, views,
    ``requires_grad``, parameter classes and attributes are as in a direct construction. Only this
    thread (and, under asyncio, this context) is concerned. May be entered again and nested.
    Parameters over memory that was not made inside (a parameter of another model, a loaded file)
    stay as they are. Parameters that share memory without being one tensor do so until a load gives
    each its own; the plan warns of it (``plan.tie``).

    What differs from a direct construction is in ``skeleton_findings(model)``: values drawn at
    random, values that cannot be had, and tensors that follow from parameters.
    """

    def __init__(self) -> None:
        self._entered: list[tuple[Build | None, Build, Any]] = []

    def _recreate_cm(self) -> skeleton:
        return skeleton()  # as a decorator: each call enters a context of its own

    def __enter__(self) -> skeleton:
        from loadstone import _skeleton_modes as modes
        from loadstone._skeleton_build import Build

        outer = modes.current()
        build = outer if outer is not None else Build()
        ordinary = modes.ordinary_tensors()
        self._entered.append((modes.push(build), build, ordinary))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        from loadstone import _skeleton_modes as modes
        from loadstone._skeleton_finish import finish

        before, build, ordinary = self._entered.pop()
        modes.pop(before)
        if before is not build and (kind is None or issubclass(kind, Exception)):
            finish(build, sys._getframe(1))
        if ordinary is not None:
            ordinary.__exit__(None, None, None)


@dataclass
class SkeletonRecord:
    """What is known of a model that was built under :class:`skeleton`.

    Attributes:
        findings: dicts with ``severity``, ``code``, ``target`` and ``message``.
        default_dtype: torch's default dtype when the build began; None: built elsewhere.
        derived: names of tensors that follow from parameters, with the names of these.
    """

    findings: list[dict[str, str]] = field(default_factory=list)
    default_dtype: Any = None
    derived: dict[str, list[str]] = field(default_factory=dict)


def skeleton_record(model: Any) -> SkeletonRecord:
    """What is known of a model that was built under :class:`skeleton`, as it is now."""
    import torch

    from loadstone._skeleton_finish import known
    from loadstone._skeleton_schema import storage_key
    from loadstone._turns import slots_of

    known.purge()
    record = SkeletonRecord()
    builds = [known.builds.get(module) for module in model.modules()]
    build = next((each for each in builds if each is not None), None)
    if build is not None:
        record.default_dtype = build.default_dtype
        if build.random_read:
            message = "the constructor looked at a value that was drawn at random"
            record.findings.append(_finding("warning", "skeleton.random", "", message))
    for slot in slots_of(model):
        if slot.kind == "parameter" or slot.tie_of is not None:
            continue
        key = storage_key(slot.tensor)
        if key is None:
            continue
        if key in known.derived:
            names = known.derived[key][1].names(model)
            record.derived[slot.name] = names
        found = _of_slot(slot, key, record.derived.get(slot.name, []), build is not None)
        if found is not None:
            record.findings.append(found)
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and torch.nn.parameter.is_lazy(parameter):
                target = f"{path}.{name}".lstrip(".")
                message = "a lazy parameter has no shape before the first forward"
                record.findings.append(
                    _finding("error", "skeleton.not_replayable", target, message)
                )
    return record


def _of_slot(
    slot: TensorSlot, key: int, parameters: list[str], built_here: bool
) -> dict[str, str] | None:
    """What there is to say of one tensor that is no parameter."""
    from loadstone._skeleton_finish import known

    if key in known.derived:
        message = f"follows from {', '.join(parameters) or 'parameters'}: recomputed after a load"
        return _finding("info", "skeleton.derived", slot.name, message)
    if key in known.failed:
        message = f"the constructor's value cannot be had: {known.failed[key][1]}"
        return _finding("error", "skeleton.not_replayable", slot.name, message)
    if key in known.random:
        message = "drawn at random by the constructor: another construction gives other values"
        return _finding("warning", "skeleton.random", slot.name, message)
    if key in known.blank and slot.tensor.numel():
        message = "memory that the constructor never wrote to: it holds no value"
        return _finding("warning", "skeleton.uninitialised", slot.name, message)
    if built_here and slot.tensor.is_meta:
        message = "the constructor itself puts it on meta"
        return _finding("error", "skeleton.not_replayable", slot.name, message)
    return None


def _finding(severity: str, code: str, target: str, message: str) -> dict[str, str]:
    return {"severity": severity, "code": code, "target": target, "message": message}


def skeleton_findings(model: Any) -> list[dict[str, str]]:
    """What in a model is not as a direct construction would have made it; see the codes:

    ``skeleton.random`` drawn at random; ``skeleton.uninitialised`` never written to by the
    constructor; ``skeleton.not_replayable`` a value that cannot be had; ``skeleton.derived`` (not a
    fault) follows from parameters, see :func:`recompute`.
    """
    return skeleton_record(model).findings


def recompute(model: Any) -> list[str]:
    """Gives tensors that follow from parameters their values, from the parameters as they are now.

    Views of a parameter become views of the one that is there now. Returns the names.
    """
    import torch

    from loadstone._skeleton_defer import Ref
    from loadstone._skeleton_finish import known
    from loadstone._skeleton_schema import storage_key
    from loadstone._turns import slots_of

    known.purge()
    done: dict[int, Any] = {}
    names = []
    for slot in slots_of(model, anew=True):
        key = storage_key(slot.tensor)
        if slot.kind == "parameter" or key not in known.derived:
            continue
        if id(slot.tensor) not in done:
            derivation = known.derived[key][1]
            with torch.no_grad():
                done[id(slot.tensor)] = derivation.compute(Ref(slot.tensor, derivation.home))
        slot.replace(done[id(slot.tensor)])
        names.append(slot.name)
    return names


def second_skeleton(model: Any, builder: Callable[[], Any]) -> list[dict[str, str]]:
    """Gives a model that is wholly on meta the constructor's values of a second one.

    Args:
        model: built by some other library on torch's meta device. Parameters stay there; buffers
            and plain tensors on meta are replaced.
        builder: builds another one of the same class and configuration; called under
            :class:`skeleton`.

    Returns:
        A finding (``skeleton.not_replayable``) for every tensor that the second model lacks.
    """
    from loadstone._skeleton_finish import known
    from loadstone._skeleton_schema import storage_key
    from loadstone._skeleton_walk import walk

    with skeleton():
        second = builder()
    sources = {slot.name: slot for slot in walk(second)}
    modules = dict(model.named_modules())
    counterparts = {
        id(module): modules[path] for path, module in second.named_modules() if path in modules
    }
    findings = []
    for slot in walk(model):
        if slot.kind == "parameter" or not slot.tensor.is_meta:
            continue
        source = sources.get(slot.name)
        if source is None or source.tensor.shape != slot.tensor.shape:
            message = "a second construction makes no such tensor"
            findings.append(_finding("error", "skeleton.not_replayable", slot.name, message))
            continue
        key = storage_key(source.tensor)
        if key in known.derived:
            with known.lock:
                weak, derivation = known.derived[key]
                known.derived[key] = (weak, derivation.moved(counterparts))
        slot.replace(source.tensor)
    return findings


def save_skeleton(model: Any, path: str | os.PathLike[str]) -> None:
    """Writes names, shapes, dtypes and kinds of all tensors of a model, for the command line.

    Args:
        model: an ``nn.Module``, usually built under :class:`skeleton`.
        path: a JSON file: ``{"targets": [{"name", "shape", "dtype", "kind", "tie_of"}]}``. Real
            tensors that the model's state dict lacks and that keep their values are left out.

    Raises:
        PlanError: ``plan.tensor_class``: a parameter or buffer is of an unknown tensor subclass.
    """
    from loadstone._dtypes import dtype_name
    from loadstone._errors import make
    from loadstone._skeleton_walk import walk

    slots = [slot for slot in walk(model) if not slot.may_be_kept]
    for slot in slots:
        if slot.obstacle:
            raise make("plan.tensor_class", slot.obstacle, tensor=slot.name)
    targets = [
        {
            "name": slot.name,
            "shape": list(slot.tensor.shape),
            "dtype": dtype_name(slot.tensor.dtype),
            "kind": slot.kind,
            "tie_of": slot.tie_of,
        }
        for slot in slots
    ]
    Path(path).write_text(json.dumps({"targets": targets}, indent=1) + "\n", encoding="utf-8")
