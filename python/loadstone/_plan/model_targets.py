"""The tensors that a model needs, as targets for the core."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loadstone import _core
from loadstone._base.dtypes import dtype_name, value_shape
from loadstone._base.text import read_text
from loadstone._model.model_lock import slots_of
from loadstone._model.ranks import reshard_fsdp
from loadstone._model.supported_tensors import ADVICE
from loadstone._model.targets import SAVED, PlannedTarget
from loadstone._model.walk import TensorSlot
from loadstone._plan import overlap
from loadstone._plan.overlap import Region
from loadstone._plan.quantization import Quantization
from loadstone._skeleton.constructor import constructor_values
from loadstone._skeleton.skeleton import skeleton_record


@dataclass
class ModelTargets:
    """The core's targets of a model and, if there is a module, its values.

    Attributes:
        not_in_state_dict: real tensors that the state dict lacks. If the checkpoint lacks one, it
            keeps its value under every policy.
        quantize: targets that become several tensors, by name.
        already_reported: missing targets that a finding already names.
        keeps_dtypes: True if no load option changes the dtypes.
        forms: dtype and tie of each tensor.
        whole_shapes: whole shapes of the tensors that are sharded over ranks.
    """

    targets: list[_core.Target]
    module: Any = None
    findings: list[_core.Finding] = field(default_factory=list)
    constructor_values: dict[str, Any] = field(default_factory=dict)
    not_in_state_dict: list[str] = field(default_factory=list)
    overlapping: list[Region] = field(default_factory=list)
    quantize: dict[str, Quantization] = field(default_factory=dict)
    already_reported: list[str] = field(default_factory=list)
    keeps_dtypes: bool = False
    forms: dict[str, tuple[Any, str]] = field(default_factory=dict)
    slots: list[TensorSlot] = field(default_factory=list)
    whole_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def memory_findings(
        self, targets: Sequence[PlannedTarget], in_place: bool
    ) -> list[_core.Finding]:
        findings = list(overlap.findings(self.overlapping, targets)) if self.overlapping else []
        real = [slot for slot in self.slots if slot.kind in SAVED and not slot.tensor.is_meta]
        if in_place and real:
            message = (
                f"the load writes into the memory of {len(real)} parameters and buffers in place; "
                "if the "
                "load fails, they are half-written"
            )
            findings.append(_core.Finding("info", "plan.in_place", real[0].name, [], message))
        return findings

    def held(self) -> set[str]:
        return {slot.name for slot in self.slots if not slot.tensor.is_meta}


def targets_of(model: Any) -> ModelTargets:
    if isinstance(model, str | os.PathLike):
        return ModelTargets(_core.skeleton_targets(read_text(model)))
    reshard_fsdp(model)
    slots = slots_of(model)
    record = skeleton_record(model)
    values = constructor_values(model, (slot for slot in slots if slot.name not in record.derived))
    had = values.keys() | record.derived.keys()
    findings = [finding for finding in record.findings if finding.target not in values]
    findings += [_obstacle(slot) for slot in slots if slot.obstacle and not slot.may_be_kept]
    slots = [slot for slot in slots if not slot.obstacle]
    return ModelTargets(
        targets=[_target(slot, slot.name in had) for slot in slots],
        module=model,
        findings=findings,
        constructor_values=values,
        not_in_state_dict=[slot.name for slot in slots if slot.may_be_kept],
        overlapping=overlap.overlapping(slots),
        forms={slot.name: (slot.tensor.dtype, slot.tie_of or "") for slot in slots},
        slots=slots,
        whole_shapes={slot.name: slot.shape for slot in slots if slot.shard is not None},
    )


def _obstacle(slot: TensorSlot) -> _core.Finding:
    message = f"'{slot.name}' cannot be loaded: {slot.obstacle}"
    return _core.Finding("error", "plan.tensor_class", slot.name, [], message, ADVICE)


def _target(slot: TensorSlot, is_made: bool) -> _core.Target:
    """Return the core's target; ``is_made``: the constructor's value is available."""
    tensor, dtype = slot.tensor, dtype_name(slot.tensor.dtype)
    is_real = not tensor.is_meta
    return _core.Target(
        slot.name,
        value_shape(slot.shape, dtype),
        dtype,
        slot.kind,
        slot.tie_of or "",
        is_real or is_made,
        str(tensor.device) if is_real else "",
        None if slot.shard is None else (slot.shard.begin, tensor.shape, slot.shard.groups),
    )
