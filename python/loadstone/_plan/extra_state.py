"""Extra state: a tensor of the checkpoint that a module takes by ``set_extra_state``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from loadstone import _core
from loadstone._base.errors import make
from loadstone._files.catalog import Catalog
from loadstone._files.read import TensorReader
from loadstone._model.model_lock import slots_of
from loadstone._model.modules import ModuleStates, named_modules, submodule
from loadstone._model.targets import PlannedTarget
from loadstone._plan.extensions import TargetExtension
from loadstone._plan.provenance import Provenance


class ExtraState(TargetExtension):
    """The extra state of a model's modules.

    Args:
        names: in the checkpoint, by path of the module.
    """

    def __init__(self, catalog: Catalog, names: Mapping[str, str]) -> None:
        self._catalog = catalog
        self._names = dict(names)

    def require_savable(self, is_pickled: bool) -> None:
        """Refuses: a file of a plan has no place for extra state."""
        message = "a plan that hands over extra state (set_extra_state) is tied to its model"
        raise make("plan.extra_state", message, tensor=next(iter(self._names.values())))

    def add_provenance(self, model: Any, provenance: dict[str, Provenance]) -> None:
        """Adds the tensors of modules that took extra state, not of those below them."""
        paths = {path for path, _ in named_modules(model)}
        for slot in slots_of(model):
            path = slot.name
            while path not in paths:
                path = path.rpartition(".")[0]
            is_own = slot.kind == "attribute" and not slot.may_be_kept and path in self._names
            if is_own and slot.name not in provenance:
                provenance[slot.name] = dataclasses.replace(
                    Provenance.kept(slot), origin="checkpoint", reason="made by set_extra_state"
                )

    def installation(
        self,
        model: Any,
        targets: Sequence[PlannedTarget],
        values: Sequence[Any],
        offload: _core.OffloadFolder,
    ) -> _Installation:
        """Reads the tensors, to the CPU."""
        reader = TensorReader(self._catalog, decodes=False)
        dtypes = {name: reader.entry(name).dtype for name in self._names.values()}
        tensors = reader.read_all(dtypes, "cpu", 1)
        return _Installation(model, {path: tensors[name] for path, name in self._names.items()})


class _Installation:
    """Tensors for ``set_extra_state``, by path of the module."""

    def __init__(self, model: Any, states: Mapping[str, Any]) -> None:
        self._model = model
        self._states = states
        self._before = ModuleStates()

    def install(self) -> None:
        """Calls ``set_extra_state`` of each module.

        Raises:
            PlanError: one of them raises (``plan.extra_state``).
        """
        for path, state in self._states.items():
            module = submodule(self._model, path)
            self._before.keep(module)
            try:
                module.set_extra_state(state)
            except Exception as error:
                what = f"set_extra_state() of '{path}' ({type(module).__name__}) failed"
                message = f"{what}: {type(error).__name__}: {error}"
                raise make("plan.extra_state", message, tensor=path) from error

    def undo(self) -> None:
        """Gives the modules the attributes that they had."""
        self._before.undo()
