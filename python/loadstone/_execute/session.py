"""One load through the entry point of a library: plan, read, install, report, audit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadstone import _core
from loadstone._base.vocabulary import MaxMemory
from loadstone._execute import execute
from loadstone._execute.audit import require_audited
from loadstone._execute.execute import ExecuteOptions, FilledValues
from loadstone._execute.report import Report
from loadstone._files.catalog import Catalog
from loadstone._model.model_lock import model_lock, slots_of
from loadstone._plan.options import LoadOptions
from loadstone._plan.placement import tensor_devices
from loadstone._plan.planned_load import PlannedLoad
from loadstone._plan.planning import make_plan
from loadstone._plan.recipes import LibraryRecipes


class LoadSession:
    """One load: adapters give it recipes and install its values as their library requires.

    The model gets no value before all values are read, and the offload folder is replaced last.
    For one thread. ``model`` stays ``None`` if the library loads it.

    Attributes:
        max_memory: limits of a load whose device map was not computed from them.
    """

    def __init__(self, options: LoadOptions) -> None:
        self.options = options
        self.model: Any = None
        self.plan: PlannedLoad | None = None
        self.max_memory: MaxMemory | None = None
        self._device_map: Mapping[str, Any] | None = None  # None: all modules are on the cpu
        self._core: _core.Report | None = None
        self._is_finished = False

    def devices(
        self, model: Any, device_map: Mapping[str, Any] | None, offload_buffers: bool = False
    ) -> dict[str, Any] | None:
        """Return each tensor's device, and ``""`` for all others; ``None``: all are on the cpu."""
        if not device_map or {str(device) for device in device_map.values()} == {"cpu"}:
            return None
        self._device_map = device_map
        slots = (slot for slot in slots_of(model) if slot.kind != "attribute")
        return {"": "cpu", **tensor_devices(slots, device_map, offload_buffers)}

    def make_plan(
        self, model: Any, catalog: Catalog, recipes: LibraryRecipes | None, **arguments: Any
    ) -> PlannedLoad:
        self.model = model
        chosen = {
            "missing": self.options.missing,
            "loras": self.options.loras,
            "max_memory": self.max_memory,
            "maps_tensors": self._device_map is not None,
        }
        self.plan = make_plan(model, catalog, recipes, **chosen | arguments)
        return self.plan

    def read_and_install(self) -> None:
        """Read all values, :meth:`install` them, then replace the offload folder."""
        assert self.plan is not None
        options = ExecuteOptions(self.options.progress, self.options.threads, self.options.receipt)
        filled, _ = execute.read_and_install(self.plan, self.model, self.install, options)
        self._core = filled.core

    def install(self, filled: FilledValues) -> None:
        """Give the values to the model; if this fails, the model gets its old tensors back."""
        assert self.plan is not None
        execute.install(self.plan, self.model, filled, self.install_tensors)
        if self._device_map is not None:
            for extension in self.plan.extensions:
                extension.prepare_hooks(self.model, self._device_map)

    def install_tensors(self, plan: PlannedLoad, model: Any, filled: FilledValues) -> None:
        """Install the tensors that no extension installs."""
        execute.install_tensors(plan, model, filled)

    @property
    def offload_index(self) -> dict[str, Any]:
        """Index of the tensors on disk, with tied tensors under each of their names."""
        return self._core.offload.index() if self._core is not None else {}

    def report_and_audit(self, model: Any) -> Report | None:
        """Return the report, and audit the model; ``None`` without a read or on a second call."""
        if self.plan is None or self._core is None or self._is_finished:
            return None
        self._is_finished = True
        with model_lock(model):
            report = execute.make_report(self.plan, model, self._core)
            self.amend_report(model, report)
            require_audited(model, report)
        return report

    def amend_report(self, model: Any, report: Report) -> None:
        """Record in the report what the library changed after the values were read."""
