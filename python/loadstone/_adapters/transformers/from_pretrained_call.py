from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from loadstone import _core
from loadstone._adapters.transformers.stripped_config import StrippedQuantizationConfig
from loadstone._base.errors import make
from loadstone._execute import ties
from loadstone._execute.execute import Filled
from loadstone._execute.report import Report
from loadstone._execute.session import LoadSession
from loadstone._files.catalog import Catalog
from loadstone._model.holders import MetaParameters
from loadstone._model.model_lock import slots_of
from loadstone._plan.options import LoadOptions
from loadstone._plan.planned_load import PlannedLoad
from loadstone._plan.provenance import OFFLOADED
from loadstone._plan.recipes import AdapterRecipes, shape_mismatch
from loadstone._skeleton.constructor import find_builder, parameter_values

DEFAULTS = LoadOptions(missing="initialise")


class FromPretrainedCall(LoadSession):
    """One call of ``from_pretrained``, without its reading. For one thread.

    Attributes:
        stripped_config: the config's quantization, if no quantizer handles it.
        initialises_missing: loadstone initialises missing tensors, even if the library reads.
        offloaded: tied tensors that hooks load from the offload folder.
    """

    def __init__(self, options: LoadOptions) -> None:
        super().__init__(options)
        self.is_constructing = False
        self.initialises_missing = False
        self.stripped_config = StrippedQuantizationConfig()
        self.offloaded: set[str] = set()
        self._before: MetaParameters | None = None
        self._ties: dict[str, str] = {}
        self._fresh: set[str] = set()  # parameters without a value, to be initialised
        self._constructed: set[str] = set()  # parameters in _fresh that no initialiser wrote to
        self._versions: dict[str, tuple[int, int]] = {}  # buffers before the initialisers
        self._rewritten: set[str] = set()  # buffers that an initialiser wrote to

    def make_plan(
        self, model: Any, catalog: Catalog, recipes: AdapterRecipes | None, **arguments: Any
    ) -> PlannedLoad:
        self._before = MetaParameters(model)
        self._ties = recipes.ties if recipes is not None else {}
        chosen = {"initialises": True, "allows_unknown_modules": True}
        return super().make_plan(model, catalog, recipes, **chosen | arguments)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Filled]:
        with super().reading() as filled:
            if self.options.adapters is not None and self.plan is not None:
                ties.follow_plan(self.model, self.plan, self._ties)
            yield filled

    def unwritten(self, name: str, tensor: torch.Tensor, **form: Any) -> torch.Tensor:
        """Return memory with a fill value, to detect whether an initialiser writes to it."""
        self._fresh.add(name)
        return torch.full_like(tensor, _sentinel(form.get("dtype") or tensor.dtype), **form)

    def note_buffers(self, model: Any) -> None:
        self._versions = {
            name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()
        }

    def construct_unwritten(self, model: Any) -> None:
        """Fill parameters that no initialiser wrote to from a second construction."""
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
        build = find_builder(model)
        values = parameter_values(build, unwritten) if build is not None else {}
        for name in unwritten:
            tensor = model.get_parameter_or_buffer(name)
            value = values.get(name)
            if value is None or value.shape != tensor.shape:
                raise make(
                    "plan.no_initialiser",
                    "it is missing, the model's initialiser does not write to it, and a second "
                    "construction gives no value for it",
                    tensor=name,
                )
            with torch.no_grad():
                tensor.copy_(value)
            self._constructed.add(name)

    def complete(self, model: Any, report: Report) -> None:
        if self._before is not None:
            self._before.note_replaced(model)
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
            elif item.origin == "tie":  # the checkpoint has both, with different values
                known[slot.name] = dataclasses.replace(item, origin="checkpoint", tie_of="")
        for name in self.offloaded & known.keys():
            known[name] = dataclasses.replace(known[name], reason=OFFLOADED)


def mismatch(
    name: str, found: tuple[int, ...], expected: tuple[int, ...], is_ignored: bool
) -> _core.Finding:
    """Return a finding; its severity follows the library's policy."""
    if is_ignored:
        return shape_mismatch(name, found, expected, severity="warning")
    hint = "ignore_mismatched_sizes=True initialises it instead"
    return shape_mismatch(name, found, expected, suggestion=hint)


def _sentinel(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _is_unwritten(tensor: torch.Tensor) -> bool:
    if tensor.dtype == torch.bool:
        return True  # bool has no sentinel; the constructor's value is right anyway
    data = tensor.detach()
    if data.is_floating_point() or data.is_complex():
        data = data if data.element_size() > 1 else data.float()
        return bool(data.isnan().any())
    return bool((data == torch.iinfo(data.dtype).min).any())
