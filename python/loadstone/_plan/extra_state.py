"""Extra state: a tensor of the checkpoint that a module takes by ``set_extra_state``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadstone._base.errors import make
from loadstone._files.catalog import Catalog
from loadstone._files.read import TensorReader
from loadstone._model.modules import ModuleStates, named_modules, submodule


class ExtraState:
    """The extra state of a model's modules.

    Args:
        names: in the checkpoint, by path of the module.
    """

    def __init__(
        self, catalog: Catalog | None = None, names: Mapping[str, str] | None = None
    ) -> None:
        self._catalog = catalog
        self._names = dict(names or {})
        self._before = ModuleStates()

    def require_none(self) -> None:
        """Refuses to write a plan that hands over extra state: a file cannot say so."""
        if self._names:
            message = "a plan that hands over extra state (set_extra_state) is tied to its model"
            raise make("plan.extra_state", message, tensor=next(iter(self._names.values())))

    def is_of(self, model: Any, name: str) -> bool:
        """Returns true for a tensor of a module that took extra state, not of one below it."""
        paths = {path for path, _ in named_modules(model)} if self._names else {""}
        while name not in paths:
            name = name.rpartition(".")[0]
        return name in self._names

    def read(self) -> dict[str, Any]:
        """The tensors, on the CPU, by path of the module."""
        if self._catalog is None or not self._names:
            return {}
        reader = TensorReader(self._catalog, decodes=False)
        dtypes = {name: reader.entry(name).dtype for name in self._names.values()}
        tensors = reader.read_all(dtypes, "cpu", 1)
        return {path: tensors[name] for path, name in self._names.items()}

    def install(self, model: Any, values: dict[str, Any]) -> None:
        """Calls ``set_extra_state`` of each module.

        Raises:
            PlanError: one of them raises (``plan.extra_state``).
        """
        self._before = ModuleStates()  # an earlier load's are final
        for path, value in values.items():
            module = submodule(model, path)
            self._before.keep(module)
            try:
                module.set_extra_state(value)
            except Exception as error:
                what = f"set_extra_state() of '{path}' ({type(module).__name__}) failed"
                message = f"{what}: {type(error).__name__}: {error}"
                raise make("plan.extra_state", message, tensor=path) from error

    def undo(self) -> None:
        """Gives the modules the attributes that they had."""
        self._before.undo()
