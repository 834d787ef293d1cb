"""Missing tensors and the proof of a load, for all releases."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from loadstone import _core
from loadstone._adapters.transformers.stripped_config import StrippedQuantizationConfig
from loadstone._base.errors import make
from loadstone._execute import execute, ties
from loadstone._execute.audit import prove
from loadstone._execute.report import Report
from loadstone._files.catalog import Catalog
from loadstone._files.weighted import Adapters
from loadstone._model.holders import Parameters
from loadstone._model.model_lock import model_lock, slots_of
from loadstone._plan.planned_load import PlannedLoad
from loadstone._plan.planning import make_plan
from loadstone._plan.provenance import OFFLOADED
from loadstone._plan.recipes import AdapterRecipes, shape_mismatch
from loadstone._skeleton.constructor import model_builder, parameter_values


@dataclasses.dataclass(frozen=True)
class TransformersOptions:
    """The arguments of loadstone's own function that the library's does not have.

    Attributes:
        dequantize: whether a quantized checkpoint is dequantized by loadstone; ``None``: where the
            library has no quantizer for it, or one that cannot work here.
        adapters: what is merged into the model; loads by name only.
        is_direct: loadstone was called by name, so unsupported loads are refused; under a patch
            they are left to the library.
    """

    missing: str | Mapping[str, str] = "initialise"
    nested_offset: Mapping[str, float] | None = None
    quantize_experts: bool = False
    progress: bool | Callable[[int, int], object] = False
    threads: int | None = None
    dequantize: bool | None = None
    is_direct: bool = False
    adapters: Adapters | None = None
    receipt: str | None = None


DEFAULTS = TransformersOptions()


class FromPretrainedCall:
    """One call of ``from_pretrained``, without its reading. For one thread."""

    def __init__(self, options: TransformersOptions) -> None:
        self.options = options
        self.is_constructing = False
        self.fills_gaps = False  # missing tensors get a value, also where the library reads
        self.claim = (
            StrippedQuantizationConfig()
        )  # the quantization that the config speaks of, and nobody took over
        self.model: Any = None
        self.plan: PlannedLoad | None = None
        self._core: _core.Report | None = None
        self._before: Parameters | None = None
        self._is_finished = False
        self._fresh: set[str] = set()  # parameters without a value, to be initialised
        self._constructed: set[str] = set()  # of those, the ones no initialiser wrote to
        self._versions: dict[str, tuple[int, int]] = {}  # of buffers, before the initialisers
        self._rewritten: set[str] = set()  # buffers that an initialiser wrote to
        self.offloaded: set[str] = set()  # tied tensors that hooks take from the offload folder

    def plan_and_read(
        self,
        model: Any,
        catalog: Catalog,
        traced: AdapterRecipes,
        device_map: Any,
        offload_folder: Any,
    ) -> execute.Filled:
        """Makes the plan and reads what it says; the model is left as it is."""
        self._before = Parameters(model)
        with model_lock(model):
            self.plan = make_plan(
                model,
                catalog,
                traced,
                adapters=self.options.adapters,
                device_map=device_map,
                offload_folder=offload_folder,
                missing=self.options.missing,
                initialises=True,
                allows_unknown_modules=True,
            )
            filled = execute.read_values(
                self.plan,
                model,
                progress=self.options.progress,
                threads=self.options.threads or 0,
                receipt=self.options.receipt,
            )
        self._core = filled.core
        if self.options.adapters is not None:
            ties.follow_plan(model, self.plan, traced.ties)
        return filled

    def unwritten(self, name: str, tensor: torch.Tensor, **form: Any) -> torch.Tensor:
        """Memory for a missing parameter, filled so that a write of an initialiser shows.

        Args:
            form: device, and dtype where it is another one.
        """
        self._fresh.add(name)
        return torch.full_like(tensor, _sentinel(form.get("dtype") or tensor.dtype), **form)

    def note_buffers(self, model: Any) -> None:
        """Notes the versions of buffers before the initialisers run."""
        self._versions = {
            name: (id(buffer), buffer._version) for name, buffer in model.named_buffers()
        }

    def construct_unwritten(self, model: Any) -> None:
        """Gives parameters that no initialiser wrote to the values of a second construction."""
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
                    "it is missing, the model's initialiser does not write to it, and a second "
                    "construction gives no value for it",
                    tensor=name,
                )
            with torch.no_grad():
                tensor.copy_(value)
            self._constructed.add(name)

    # --- proof -----------------------------------------------------------------------------------

    def finish(self, model: Any) -> Report | None:
        """Makes the report, and proves that every value has an origin.

        Returns:
            ``None`` if the library did the reading, or after the first call.
        """
        if self.plan is None or self._core is None or self._is_finished:
            return None
        self._is_finished = True
        with model_lock(model):
            return self._proved(model, self.plan, self._core)

    def _proved(self, model: Any, plan: PlannedLoad, core: _core.Report) -> Report:
        if self._before is not None:
            self._before.note_replaced(model)
        report = execute.make_report(plan, model, core)
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
        for name in self.offloaded & known.keys():
            known[name] = dataclasses.replace(known[name], reason=OFFLOADED)
        prove(model)
        return report


def mismatch(
    name: str, found: tuple[int, ...], expected: tuple[int, ...], is_ignored: bool
) -> _core.Finding:
    """The finding for a tensor of another shape, by the library's policy for these."""
    if is_ignored:
        return shape_mismatch(name, found, expected, severity="warning")
    hint = "ignore_mismatched_sizes=True initialises it instead"
    return shape_mismatch(name, found, expected, suggestion=hint)


def _sentinel(dtype: torch.dtype) -> float | int:
    """The fill of memory that no initialiser has written to."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _is_unwritten(tensor: torch.Tensor) -> bool:
    """Whether any element still holds the sentinel."""
    if tensor.dtype == torch.bool:
        return True  # bool has no sentinel, and the constructor's value is right anyway
    data = tensor.detach()
    if data.is_floating_point() or data.is_complex():
        data = data if data.element_size() > 1 else data.float()
        return bool(data.isnan().any())
    return bool((data == torch.iinfo(data.dtype).min).any())
