"""A model's tensors stay the objects that they are, and get new memory.

Optimizers, hooks and other owners hold a parameter by identity. Its value is made in memory of its
own. When everything is there, ``.data`` is set; tensors on meta exchange their contents
(``_model/contents.py``). Until then the model is as it was. Tensors that share memory share it
afterwards, too: their part of it is copied, and all of them move.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loadstone import torch as memory
from loadstone._base.dtypes import dtype_name
from loadstone._base.errors import Error, listed
from loadstone._execute import audit, ties
from loadstone._model import devices, half_written
from loadstone._model.contents import Contents, may_exchange, takes_data
from loadstone._model.half_written import WRITTEN, end_byte

if TYPE_CHECKING:
    import torch

    from loadstone._model.targets import PlannedTarget
    from loadstone._model.walk import TensorSlot

# Copied memory begins where elements of all dtypes may.
_ALIGNMENT = 64


def keeps_identity(slot: TensorSlot, target: PlannedTarget) -> bool:
    """Return whether a value goes to memory of the kind that the tensor has, by ``.data``.

    A tensor of ``torch.inference_mode()`` gives way to one that can be trained, and one that
    overlaps itself to one that has its elements.
    """
    return (
        _fits(slot, target) and not slot.tensor.is_inference() and not ties.is_split(slot, target)
    )


def held_bytes(
    slots: Sequence[TensorSlot], targets: Sequence[PlannedTarget], in_place: bool
) -> dict[str, int]:
    """Bytes per device that the model's own tensors take beside what the plan counts."""
    by_name = {slot.name: slot for slot in slots if not slot.tensor.is_meta}
    pairs = [(by_name[each.name], each) for each in targets if each.name in by_name]
    held: dict[str, int] = defaultdict(int)
    strided: dict[str, int] = defaultdict(int)
    for slot, target in pairs:
        if not _is_written(target) or (in_place and _is_direct(slot, target)):
            continue
        device = str(slot.tensor.device)
        held[device] += slot.tensor.nbytes
        if not slot.tensor.is_contiguous():
            strided[device] = max(strided[device], slot.tensor.nbytes)
    for group in _groups(pairs) if not in_place else ():
        beside = group.nbytes - sum(t.nbytes for s, t in pairs if s in group and _is_written(t))
        held[group.device] += max(0, beside)
    for device, nbytes in strided.items():
        held[device] += nbytes  # a copy in the tensor's own order, one at a time
    return dict(held)


class Destinations:
    """Where values are made, and how the model gets them. For one load.

    Args:
        in_place: the memory that is there is written, and nothing is held back.
    """

    def __init__(
        self, slots: Sequence[TensorSlot], targets: Sequence[PlannedTarget], in_place: bool
    ) -> None:
        import torch

        self._pairs = list(zip(slots, targets, strict=True))
        self.in_place = in_place
        self._views: dict[int, torch.Tensor] = {}  # of copied memory, by tensor
        self._recast: list[tuple[torch.Tensor, torch.Tensor]] = []  # to another dtype or device
        # Tensors with the memory and the gradient that they had.
        self._moves: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        self._contents = Contents()
        # A byte for each target: whether the core has begun to write it. None: all may be written.
        self.begun: torch.Tensor | None = None
        if in_place:
            self.begun = torch.zeros(len(slots), dtype=torch.uint8, device="cpu")
        for group in _groups(self._pairs) if not in_place else ():
            self._views |= group.copied()

    def memory(self, index: int) -> torch.Tensor:
        """Memory on its device for the core to write a value to."""
        slot, target = self._pairs[index]
        if self.in_place and _is_direct(slot, target):
            return slot.tensor
        view = self._views.get(id(slot.tensor)) if keeps_identity(slot, target) else None
        if view is not None and view.is_contiguous():
            return view
        return devices.empty(target.name, target.shape, target.dtype, target.device)

    def take(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """The tensor that the model will have for a value: its own, or one of the same kind.

        Its own may have to give way in :meth:`commit`: see :meth:`final`.
        """
        import torch

        self.begun = None  # from here on they get values that are not the core's
        slot, target = self._pairs[index]
        if value is slot.tensor:
            _note_write(value)
            return value
        if not keeps_identity(slot, target):
            if takes_data(slot, value):
                self._recast.append((slot.tensor, value.detach()))
            elif may_exchange(slot):
                self._contents.add(slot.tensor, value)
            else:
                return memory.like(slot.tensor, value)
            return slot.tensor
        home = self._views.get(id(slot.tensor))
        if home is None:
            is_like = self.in_place or value.stride() == slot.tensor.stride()
            with devices.memory_for(target.name, target.device):
                home = value if is_like else torch.empty_like(slot.tensor, requires_grad=False)
        if home is not value and home.data_ptr() != value.data_ptr():
            home.copy_(value)
        self._views[id(slot.tensor)] = home
        return slot.tensor

    def commit(self) -> None:
        """Gives the model's tensors their values."""
        for slot, _ in self._pairs:
            tensor, home = slot.tensor, self._views.pop(id(slot.tensor), None)
            if home is None:
                continue
            if self.in_place:
                tensor.data.copy_(home)
                _note_write(tensor)
            else:
                self._move(tensor, home)
        for tensor, home in self._recast:
            self._move(tensor, home)
        self._recast.clear()
        self._contents.commit()

    def _move(self, tensor: torch.Tensor, home: torch.Tensor) -> None:
        """Sets ``.data``. A gradient of another dtype or device is dropped: it fits no longer."""
        grad = tensor.grad if tensor.is_leaf else None
        self._moves.append((tensor, tensor.data, grad))
        if grad is not None and (grad.dtype, grad.device) != (home.dtype, home.device):
            tensor.grad = None
        tensor.data = home
        _note_write(tensor)

    def final(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that the model has in place of one that :meth:`take` returned."""
        return self._contents.instead_of(tensor)

    def report_half_written(self, error: BaseException) -> None:
        """Names the tensors whose memory a load that failed may have written to, if any.

        They are noted in the error, and no audit accounts for them until a load has written them.
        """
        if not self.in_place:
            return
        written = [
            slot
            for index, (slot, target) in enumerate(self._pairs)
            if _is_written(target) and _fits(slot, target) and self._may_have_begun(index)
        ]
        for slot in written:
            _note_write(slot.tensor)
        audit.forget([slot.tensor for slot in written])
        roots = {slot.name for slot in written}
        half_written.note(s for s, _ in self._pairs if (s.tie_of or s.name) in roots)
        names = [slot.name for slot in written]
        if isinstance(error, Error):
            error.half_written = names
        if names:
            half = f"The model may be half-written: {listed(names)}"
            error.add_note(f"{half}. Load again to repair it")

    def _may_have_begun(self, index: int) -> bool:
        """Return whether the tensor's own memory may have got bytes of its new value."""
        if self.begun is None:
            return True
        return _is_direct(*self._pairs[index]) and bool(self.begun[index])

    def undo(self) -> None:
        """Gives them those that they had before :meth:`commit`."""
        for tensor, data, grad in self._moves:
            tensor.data = data
            if grad is not None:
                tensor.grad = grad
        self._contents.undo()


class _Group:
    """Tensors of a model in one memory, and the part of it that they reach into."""

    def __init__(self, slots: list[TensorSlot]) -> None:
        self._slots = slots
        ends = [end_byte(slot.tensor) for slot in slots]
        begins = [slot.tensor.storage_offset() * slot.tensor.element_size() for slot in slots]
        self._begin, self._end = min(begins) // _ALIGNMENT * _ALIGNMENT, max(ends)
        self.nbytes = self._end - self._begin
        self.device = str(slots[0].tensor.device)

    def __contains__(self, slot: TensorSlot) -> bool:
        return slot in self._slots

    def copied(self) -> dict[int, torch.Tensor]:
        """By tensor, the same view of a copy of the memory."""
        import torch

        storage = self._slots[0].tensor.untyped_storage()
        device = storage.device
        whole = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        with devices.memory_for(self._slots[0].name, self.device):
            copy = whole[self._begin : self._end].clone().untyped_storage()
        views = {}
        for slot in self._slots:
            old = slot.tensor
            offset = old.storage_offset() - self._begin // old.element_size()
            blank = torch.empty(0, dtype=old.dtype, device=device)
            views[id(old)] = blank.set_(copy, offset, old.shape, old.stride())
        return views


def _groups(pairs: Sequence[tuple[TensorSlot, PlannedTarget]]) -> list[_Group]:
    """Of several tensors each, at least one of which gets a value where it is."""
    from loadstone._skeleton.schema import storage_key

    shared: dict[int, list[tuple[TensorSlot, PlannedTarget]]] = defaultdict(list)
    for slot, target in pairs:
        key = storage_key(slot.tensor) if slot.tie_of is None and not slot.tensor.is_meta else None
        if key is not None and slot.tensor.numel() and keeps_identity(slot, target):
            shared[key].append((slot, target))
    return [
        _Group([slot for slot, _ in group])
        for group in shared.values()
        if len(group) > 1 and any(_is_written(target) for _, target in group)
    ]


def _fits(slot: TensorSlot, target: PlannedTarget) -> bool:
    tensor = slot.tensor
    if tensor.is_meta or slot.obstacle or target.encoding or _overlaps_itself(tensor):
        return False
    if slot.tie_of is not None:
        return False  # the memory is for the value of the first place
    return (str(tensor.device), dtype_name(tensor.dtype)) == (target.device, target.dtype)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may be one: expanded tensors, strides within the extent of others."""
    reach = 0
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1:
            if stride <= reach:
                return True
            reach += stride * (extent - 1)
    return False


def _is_written(target: PlannedTarget) -> bool:
    return target.origin in WRITTEN and target.device not in ("disk", "meta")


def _is_direct(slot: TensorSlot, target: PlannedTarget) -> bool:
    """Whether the core can write to the tensor itself."""
    is_the_cores = target.origin != "initialiser"
    is_its_own = not ties.is_split(slot, target)
    return is_the_cores and is_its_own and _fits(slot, target) and slot.tensor.is_contiguous()


def _note_write(tensor: Any) -> None:
    """Tells autograd, which may have saved the old value."""
    import torch

    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
