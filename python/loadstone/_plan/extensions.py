"""Extensions: add targets to a plan that need more than a value read into a tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loadstone import _core
from loadstone._model.targets import PlannedTarget
from loadstone._model.walk import TensorSlot
from loadstone._plan.model_targets import ModelTargets
from loadstone._plan.provenance import Provenance


class TargetExtension:
    """Base class of extensions, which a plan calls in turn; each overrides the methods it needs.

    Library adapters make the extensions: see ``_base/adapters.py``.
    """

    def expand(self, targets: ModelTargets) -> None:
        """Replace targets of the model's tensors by the targets that the core reads or makes."""

    def slots(self, slots: list[TensorSlot]) -> list[TensorSlot]:
        """Return the model's tensors, replaced like the targets in :meth:`expand`."""
        return slots

    def installed_targets(self) -> set[str]:
        """Return the names of the targets that :meth:`prepare` installs."""
        return set()

    def devices(self, devices: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the device map of tensors, including the targets that :meth:`expand` adds."""
        return devices

    def findings(self, targets: Sequence[PlannedTarget]) -> list[_core.Finding]:
        return []

    def before_read(self) -> None:
        """Raise the errors that can be detected before memory is allocated."""

    def prepare(
        self,
        model: Any,
        targets: Sequence[PlannedTarget],
        values: Sequence[Any],
        offload: _core.OffloadFolder,
    ) -> Callable[[], None] | None:
        """Prepare the model's new state from the values; return the function that installs it.

        The returned function may change any module of the model: if it or a later step of the load
        fails, the load restores all modules. ``offload`` is not committed yet.
        """
        return None

    def prepare_hooks(self, model: Any, device_map: Mapping[str, Any]) -> None:
        """Prepare the new state for hooks that a library attaches to a device map's modules."""

    def add_provenance(self, model: Any, provenance: dict[str, Provenance]) -> None:
        """Add entries for tensors that :meth:`prepare` has installed."""

    def require_savable(self, is_pickled: bool) -> None:
        """Raise an error if a saved plan could not be executed after it is read again."""
