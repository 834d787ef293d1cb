"""Extra state: checkpoint tensors that modules take through ``set_extra_state``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loadstone import _core
from loadstone._base.errors import new_error
from loadstone._base.names import parent_name
from loadstone._files.catalog import Catalog
from loadstone._files.read import TensorReader
from loadstone._model.model_lock import slots_of
from loadstone._model.modules import named_modules, submodule
from loadstone._model.targets import PlannedTarget
from loadstone._plan.extensions import TargetExtension
from loadstone._plan.provenance import Provenance


@dataclasses.dataclass
class ExtraState(TargetExtension):
    """Extra state of modules; ``names`` maps module paths to names in the checkpoint."""

    catalog: Catalog
    names: Mapping[str, str]

    def require_savable(self, is_pickled: bool) -> None:
        """Raise: the file of a plan cannot store extra state."""
        message = "a plan with extra state (set_extra_state) cannot be saved: it requires its model"
        raise new_error("plan.extra_state", message, tensor=next(iter(self.names.values())))

    def add_provenance(self, model: Any, provenance: dict[str, Provenance]) -> None:
        """Record the tensors that modules with extra state own, without those of submodules."""
        paths = {path for path, _ in named_modules(model)}
        for slot in slots_of(model):
            path = slot.name
            while path not in paths:
                path = parent_name(path)
            is_own = slot.kind == "attribute" and not slot.may_be_kept and path in self.names
            if is_own and slot.name not in provenance:
                provenance[slot.name] = dataclasses.replace(
                    Provenance.kept(slot), origin="checkpoint", reason="made by set_extra_state"
                )

    def prepare(
        self,
        model: Any,
        targets: Sequence[PlannedTarget],
        values: Sequence[Any],
        offload: _core.OffloadFolder,
    ) -> Callable[[], None]:
        reader = TensorReader(self.catalog, decodes=False)
        dtypes = {name: reader.entry(name).dtype for name in self.names.values()}
        tensors = reader.read_all(dtypes, "cpu", 1)

        def install() -> None:
            for path, name in self.names.items():
                _set_extra_state(submodule(model, path), path, tensors[name])

        return install


def _set_extra_state(module: Any, path: str, state: Any) -> None:
    try:
        module.set_extra_state(state)
    except Exception as error:
        failed = f"set_extra_state() of '{path}' ({type(module).__name__}) failed"
        message = f"{failed}: {type(error).__name__}: {error}"
        raise new_error("plan.extra_state", message, tensor=path) from error
