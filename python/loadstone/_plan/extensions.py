"""Kinds of targets that need more in a load than values read into tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from loadstone import _core
from loadstone._model.targets import PlannedTarget
from loadstone._model.walk import TensorSlot
from loadstone._plan.model_targets import ModelTargets
from loadstone._plan.provenance import Provenance


class Installation(Protocol):
    """New state of a model for one load, prepared before the model changes."""

    def install(self) -> None:
        """Changes the model; :meth:`undo` takes that back, also after a failure half-way."""

    def undo(self) -> None: ...


class TargetExtension(Protocol):
    """A kind of target. A plan has a list of them, and calls each in its turn.

    The methods here do nothing: a kind overrides those that it needs. Adapters make the extensions
    of their libraries: see ``_base/adapters.py``.
    """

    def expand(self, targets: ModelTargets) -> None:
        """Replaces targets of the model's tensors by those that the core reads or makes."""
        return

    def slots(self, slots: list[TensorSlot]) -> list[TensorSlot]:
        """The model's tensors, replaced in the same way."""
        return slots

    def installed_targets(self) -> set[str]:
        """Targets that :meth:`installation` gives to the model."""
        return set()

    def devices(self, devices: Mapping[str, Any]) -> Mapping[str, Any]:
        """A device map by tensors, with the targets that :meth:`expand` adds."""
        return devices

    def findings(self, targets: Sequence[PlannedTarget]) -> list[_core.Finding]:
        """Problems of the plan for these targets."""
        return []

    def before_read(self) -> None:
        """Refuses what can be refused before memory is allocated."""
        return

    def installation(
        self,
        model: Any,
        targets: Sequence[PlannedTarget],
        values: Sequence[Any],
        offload: _core.OffloadFolder,
    ) -> Installation | None:
        """Prepares the model's new state from the values that were read.

        Args:
            offload: the folder, before its commit.
        """
        return None

    def prepare_hooks(self, model: Any, device_map: Mapping[str, Any]) -> None:
        """Prepares the new state for hooks that a library attaches to modules of a map."""
        return

    def add_provenance(self, model: Any, provenance: dict[str, Provenance]) -> None:
        """Adds entries for tensors that :meth:`installation` gave to the model."""
        return

    def require_savable(self, is_pickled: bool) -> None:
        """Refuses to write a plan that could not be carried out when it is read again."""
        return
