"""One load through the entry point of a library: plan, read, install, finish."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from loadstone import _core
from loadstone._execute import execute
from loadstone._execute.audit import prove
from loadstone._execute.report import Report
from loadstone._files.catalog import Catalog
from loadstone._model.model_lock import model_lock
from loadstone._plan.options import LoadOptions
from loadstone._plan.placement import device_of
from loadstone._plan.planned_load import PlannedLoad
from loadstone._plan.planning import make_plan
from loadstone._plan.recipes import AdapterRecipes


class LoadSession:
    """One load: adapters give it recipes and install its values as their library requires.

    The model gets nothing before all values are read, and its offload folder is replaced last.
    For one thread. ``model`` stays ``None`` if the library loads it.
    """

    def __init__(self, options: LoadOptions) -> None:
        self.options = options
        self.model: Any = None
        self.plan: PlannedLoad | None = None
        self._device_map: Mapping[str, Any] | None = None  # of modules, if not all are on the cpu
        self._core: _core.Report | None = None
        self._is_finished = False

    def devices(
        self, model: Any, device_map: Mapping[str, Any] | None, offload_buffers: bool = False
    ) -> dict[str, Any] | None:
        """Return the device of every tensor by a map of modules; ``None``: all on the cpu.

        Without ``offload_buffers``, buffers of modules on disk stay in memory, as in accelerate.
        """
        if not device_map or {str(device) for device in device_map.values()} == {"cpu"}:
            return None
        self._device_map = device_map
        buffers = {name for name, _ in model.named_buffers()}
        devices: dict[str, Any] = {"": "cpu"}
        for name in (*model.state_dict(), *buffers):
            device = device_of(name, device_map, "cpu")
            stays = device == "disk" and name in buffers and not offload_buffers
            devices[name] = "cpu" if stays else device
        return devices

    def make_plan(
        self, model: Any, catalog: Catalog, recipes: AdapterRecipes | None, **arguments: Any
    ) -> PlannedLoad:
        self.model = model
        chosen = {
            "missing": self.options.missing,
            "adapters": self.options.adapters,
            "maps_tensors": self._device_map is not None,
        }
        self.plan = make_plan(model, catalog, recipes, **chosen | arguments)
        return self.plan

    @contextlib.contextmanager
    def reading(self) -> Iterator[execute.Filled]:
        """Read all values for the block to install, then replace the offload folder.

        The model gets its old tensors back if the block fails.
        """
        assert self.plan is not None
        with model_lock(self.model):
            before = execute.ModelState(self.model)
            filled = execute.read_values(
                self.plan,
                self.model,
                progress=self.options.progress,
                threads=self.options.threads or 0,
                receipt=self.options.receipt,
            )
            try:
                yield filled
                if self._device_map is not None:
                    for extension in self.plan.extensions:
                        extension.prepare_hooks(self.model, self._device_map)
                filled.offload.commit()
            except BaseException as error:
                before.restore(filled, error)
                raise
            self._core = filled.core

    @property
    def offload_index(self) -> dict[str, Any]:
        """Index of tensors on disk, tied ones under each of their names."""
        return self._core.offload.index() if self._core is not None else {}

    def finish(self, model: Any) -> Report | None:
        """Make the report and audit the model; ``None`` if nothing was read, or on later calls."""
        if self.plan is None or self._core is None or self._is_finished:
            return None
        self._is_finished = True
        with model_lock(model):
            report = execute.make_report(self.plan, model, self._core)
            self.complete(model, report)
            prove(model, report)
        return report

    def complete(self, model: Any, report: Report) -> None:
        """Add to the report what the library did after the values were read."""
