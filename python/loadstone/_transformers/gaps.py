"""What a load does beside reading, whatever the release: gaps in the checkpoint, and the proof."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from loadstone import _core, _execute
from loadstone._audit import audit
from loadstone._constructor import model_builder, parameter_values
from loadstone._errors import make
from loadstone._plan import Plan
from loadstone._report import Report
from loadstone._turns import in_turn_with, slots_of


@dataclasses.dataclass(frozen=True)
class TransformersOptions:
    """What loadstone's own function takes beside the library's arguments.

    Attributes:
        is_direct: loadstone was called by name: what it cannot do is refused. Else (under a patch)
            it is left to the library.
    """

    missing: str | Mapping[str, str] = "initialise"
    nested_offset: Mapping[str, float] | None = None
    quantize_experts: bool = False
    progress: bool | Callable[[int, int], object] = False
    threads: int | None = None
    is_direct: bool = False


class Gaps:
    """One call of ``from_pretrained``, without its reading. For one thread."""

    def __init__(self, options: TransformersOptions) -> None:
        self.options = options
        self.is_constructing = False
        self.fills_gaps = False  # also where the library reads: what is missing gets a value
        self.model: Any = None
        self.plan: Plan | None = None
        self._core: _core.Report | None = None
        self._is_finished = False
        self._fresh: set[str] = set()  # parameters without a value, to be initialised
        self._constructed: set[str] = set()  # of those, the ones no initialiser wrote to
        self._versions: dict[str, tuple[int, int]] = {}  # of buffers, before the initialisers
        self._rewritten: set[str] = set()  # buffers that an initialiser wrote to

    def unwritten(self, name: str, tensor: torch.Tensor, **form: Any) -> torch.Tensor:
        """Memory for a parameter that is missing, which tells whether an initialiser wrote to it.

        Args:
            form: device, and dtype where it is another one.
        """
        self._fresh.add(name)
        return torch.full_like(tensor, _sentinel(form.get("dtype") or tensor.dtype), **form)

    def note_buffers(self, model: Any) -> None:
        """Before the initialisers run."""
        self._versions = {
            name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()
        }

    def complete(self, model: Any) -> None:
        """After the library's initialisers: nothing is left without a value."""
        for name, buffer in model.named_buffers():
            if self._versions.get(name) != (id(buffer), buffer._version):
                self._rewritten.add(name)
        unwritten = [
            name
            for name in sorted(self._fresh)
            if _is_unwritten(model.get_parameter_or_buffer(name))
        ]
        if not unwritten:
            return
        build = model_builder(model)
        values = parameter_values(build, unwritten) if build is not None else {}
        for name in unwritten:
            tensor = model.get_parameter_or_buffer(name)
            value = values.get(name)
            if value is None or value.shape != tensor.shape:
                raise make(
                    "plan.no_initialiser",
                    "it is missing, the model's initialiser leaves it as it is, and a second "
                    "construction does not tell its value",
                    tensor=name,
                )
            with torch.no_grad():
                tensor.copy_(value)
            self._constructed.add(name)

    # --- proof -----------------------------------------------------------------------------------

    def finish(self, model: Any) -> Report | None:
        """Notes where every value came from, and proves that there is none without an origin.

        Returns:
            ``None`` where the library did the reading, or this was done before.
        """
        if self.plan is None or self._core is None or self._is_finished:
            return None
        self._is_finished = True
        with in_turn_with(model):
            return self._proved(model, self.plan, self._core)

    def _proved(self, model: Any, plan: Plan, core: _core.Report) -> Report:
        report = _execute.make_report(plan, model, core)
        known = report.provenance
        for slot in slots_of(model):
            item = known.get(slot.name)
            if item is None:
                continue
            if slot.tie_of is not None:
                known[slot.name] = dataclasses.replace(
                    item, origin="tie", tie_of=slot.tie_of, sources=(), reason=""
                )
            elif slot.name in self._constructed:
                reason = "missing, and the model's initialiser leaves it as the constructor made it"
                known[slot.name] = dataclasses.replace(item, origin="constructor", reason=reason)
            elif slot.name in self._rewritten and item.origin == "constructor":
                known[slot.name] = dataclasses.replace(item, origin="initialiser")
            elif item.origin == "tie":  # the library found both, and that they differ
                known[slot.name] = dataclasses.replace(item, origin="checkpoint", tie_of="")
        audit(model).require_real()
        return report


def mismatch(
    name: str, found: tuple[int, ...], expected: tuple[int, ...], is_ignored: bool
) -> _core.Finding:
    """A tensor of another shape than the model's."""
    return _core.Finding(
        "warning" if is_ignored else "error",
        "plan.shape",
        name,
        [],
        f"'{name}' is {list(found)} in the checkpoint, the model wants {list(expected)}",
        "" if is_ignored else "ignore_mismatched_sizes=True initialises it instead",
    )


def _sentinel(dtype: torch.dtype) -> float | int:
    """What memory holds that nobody wrote to."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _is_unwritten(tensor: torch.Tensor) -> bool:
    """Whether any element is still what it was filled with."""
    if tensor.dtype == torch.bool:
        return True  # a sentinel cannot be told from a value: the constructor's is right anyway
    data = tensor.detach()
    if data.is_floating_point() or data.is_complex():
        data = data if data.element_size() > 1 else data.float()
        return bool(data.isnan().any())
    return bool((data == torch.iinfo(data.dtype).min).any())
