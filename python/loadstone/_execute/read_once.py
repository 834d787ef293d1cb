"""Ranks of a node that read each byte once: one rank reads a tensor and sends its slices.

Each rank plans its slices, and all ranks have the same plan of whole tensors. The ranks read these
in batches: each rank reads some whole tensors of a batch and sends the other ranks their slices.
Before anything is sent, and at the end, the ranks exchange whether they failed. If one
failed, all raise an error, and no model gets a value.
"""

from __future__ import annotations

import contextlib
import platform
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from loadstone import _core
from loadstone._base.errors import new_error
from loadstone._base.progress import ProgressCallback
from loadstone._execute.destinations import Destinations
from loadstone._model import devices, tensor_memory
from loadstone._model.targets import PlannedTarget
from loadstone._model.tensor_memory import bytes_of
from loadstone._plan.planned_load import PlannedLoad
from loadstone._plan.shared_read import SharedReadPlan, require_group

Slice = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # begin, groups and shape

# The ranks of the load that the current context executes.
_PEERS: ContextVar[Peers | None] = ContextVar("loadstone_peers", default=None)

# Threads take turns, because messages of two simultaneous loads would be confused.
_one_at_a_time = threading.Lock()


def read(
    plan: PlannedLoad,
    destinations: Destinations,
    values: list[Any],
    callback: ProgressCallback | None,
    reading: Mapping[str, Any],
) -> _core.Report:
    """Fill ``values`` with this rank's part of each target of the plan."""
    shared, peers = plan.shared_read, _PEERS.get()
    assert shared is not None and peers is not None
    with torch.no_grad():
        slices = _agree_on_slices(peers, shared, plan.targets)
        destinations.begun = None  # other ranks also send values, which the core does not record
        reports = [_execute_own(plan, shared, destinations, values, reading)]
        load = [0] * peers.count  # number of bytes that each rank has read
        for wave in shared.waves():
            owners = _owners(shared, wave, load)
            local_indices = [index for index in wave if owners[index] == peers.rank]
            sources = {index: _fresh(shared.targets[index]) for index in local_indices}
            reports.append(_execute(shared.core, sources, callback, reading))
            for index in wave:
                values[index] = _memory(plan, destinations, index)
            parts = {index: _parts(source, index, slices) for index, source in sources.items()}
            peers.agree()  # all memory is allocated, so the exchange cannot run out of memory
            peers.exchange(wave, owners, parts, values)
            for index in wave:
                values[index] = values[index].to(plan.targets[index].device)
    return _core.merge_reports(reports, plan.core)


@contextlib.contextmanager
def session(is_wanted: bool) -> Iterator[None]:
    """Make ranks that load together fail together: an error in the block reaches all ranks."""
    if not is_wanted or _PEERS.get() is not None:
        yield
        return
    with _one_at_a_time, Peers() as peers:
        token = _PEERS.set(peers)
        try:
            yield
        finally:
            _PEERS.reset(token)


def finish() -> None:
    """Raise if another rank of the session failed."""
    peers = _PEERS.get()
    if peers is not None:
        peers.agree()
        peers.is_over = True


def _agree_on_slices(
    peers: Peers, shared: SharedReadPlan, targets: Sequence[PlannedTarget]
) -> list[dict[int, Slice]]:
    """Return each rank's slice of each tensor; raise if the ranks load different things."""
    slices = {i: (*targets[i].slice_position, targets[i].shape) for i in shared.exchanged}
    answers = peers.gather((shared.terms(), slices))
    for rank, (terms, _) in zip(peers.ranks, answers, strict=True):
        for name, term in terms.items():
            if term != answers[0][0][name]:
                message = f"rank {rank} has a different plan: {name} differ"
                raise new_error("plan.ranks", message, expected=f"those of rank {peers.ranks[0]}")
    return [rank_slices for _, rank_slices in answers]


def _execute_own(
    plan: PlannedLoad,
    shared: SharedReadPlan,
    destinations: Destinations,
    values: list[Any],
    reading: Mapping[str, Any],
) -> _core.Report:
    """Make the values that no file contains; each rank makes them itself."""
    exchanged = set(shared.exchanged)
    for index, target in enumerate(plan.targets):
        if target.delivery == "memory" and index not in exchanged:
            values[index] = _memory(plan, destinations, index)
    local_values = {index: value for index, value in enumerate(values) if value is not None}
    report = _execute(plan.core, local_values, None, reading)
    for index, value in local_values.items():
        values[index] = value.to(plan.targets[index].device)
    return report


def _execute(
    core: _core.Plan,
    tensors: dict[int, torch.Tensor],
    callback: ProgressCallback | None,
    reading: Mapping[str, Any],
) -> _core.Report:
    rows = [tensor_memory.destination(tensors.get(index)) for index in range(len(core))]
    return _core.execute(core, rows, progress=callback, partial=True, **reading)


def _owners(shared: SharedReadPlan, wave: list[int], load: list[int]) -> dict[int, int]:
    """Choose the rank that reads each tensor; every rank computes the same choice.

    Neighbouring tensors go to one rank, which reads them in one pass. The rank that has read least
    begins.
    """
    ranks = sorted(range(len(load)), key=load.__getitem__)
    total = max(1, sum(shared.targets[index].nbytes for index in wave))
    owners, done = {}, 0
    for index in wave:
        owners[index] = ranks[min(done * len(load) // total, len(load) - 1)]
        done += shared.targets[index].nbytes
        load[owners[index]] += shared.targets[index].nbytes
    return owners


def _fresh(target: PlannedTarget) -> torch.Tensor:
    return devices.empty(target.name, target.shape, target.dtype, "cpu")


def _memory(plan: PlannedLoad, destinations: Destinations, index: int) -> torch.Tensor:
    target = plan.targets[index]
    return destinations.memory(index) if target.device == "cpu" else _fresh(target)


def _cut(tensor: torch.Tensor, part: Slice) -> torch.Tensor:
    """Return a slice; an empty ``begin`` means the whole tensor."""
    begin, groups, shape = part
    if not begin:
        return tensor
    counts = groups or (1,) * len(shape)
    pairs = zip(counts, tensor.shape, strict=True)
    parts = tensor.reshape([size for count, extent in pairs for size in (count, extent // count)])
    for dim, (first, extent, count) in enumerate(zip(begin, shape, counts, strict=True)):
        parts = parts.narrow(2 * dim + 1, first, extent // count)
    return parts.reshape(shape)


def _parts(
    source: torch.Tensor, index: int, slices: Sequence[dict[int, Slice]]
) -> list[torch.Tensor]:
    """Return each rank's slice of a whole tensor; equal slices share one copy."""
    wanted = [rank_slices[index] for rank_slices in slices]
    copies = {part: _cut(source, part).contiguous() for part in set(wanted)}
    return [copies[part] for part in wanted]


class Peers:
    """The ranks of the default process group on this machine; ``rank`` indexes ``ranks``."""

    def __init__(self) -> None:
        require_group()
        self.is_over = False  # all ranks have ended, or a failure was sent
        self._group: Any = None
        self._is_own = False
        nodes: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(nodes, node())
        here = nodes[dist.get_rank()]
        for name in dict.fromkeys(nodes) if len(set(nodes)) > 1 else ():
            ranks = [rank for rank, other in enumerate(nodes) if other == name]
            group = dist.new_group(ranks, backend="gloo")
            if name == here:
                self._group, self._is_own = group, True
        self.ranks = [rank for rank, name in enumerate(nodes) if name == here]
        self.rank, self.count = self.ranks.index(dist.get_rank()), len(self.ranks)

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: object) -> None:
        if not self.is_over:
            self.gather(None, error)
        if self._is_own:
            dist.destroy_process_group(self._group)

    def gather(self, value: Any, error: BaseException | None = None) -> list[Any]:
        """Exchange values; raise if another rank failed.

        A rank that fails sends its error instead of its next value.
        """
        answers: list[Any] = [None] * self.count
        text = None if error is None else str(error) or type(error).__name__
        dist.all_gather_object(answers, (text, value), group=self._group)
        failed = [(rank, text) for rank, (text, _) in zip(self.ranks, answers, strict=True) if text]
        self.is_over = self.is_over or bool(failed)
        if failed and error is None:
            rank, text = failed[0]
            raise new_error("plan.ranks", f"rank {rank} could not load: {text}")
        return [answer for _, answer in answers]

    def agree(self) -> None:
        self.gather(None)

    def exchange(
        self,
        wave: list[int],
        owners: dict[int, int],
        parts: dict[int, list[torch.Tensor]],
        values: list[Any],
    ) -> None:
        """Send the other ranks their slices of this rank's tensors; receive this rank's slices."""
        work: Any
        pending: list[tuple[Any, torch.Tensor]] = []  # keeps buffers alive until they are sent
        received = []
        for index in wave:
            owner = owners[index]
            if owner != self.rank:
                value = values[index]
                if value.numel() == 0:
                    continue
                # A strided destination gets a copy of the received elements.
                buffer = value.contiguous()
                work = dist.irecv(bytes_of(buffer), self.ranks[owner], group=self._group, tag=index)
                received.append((work, value, buffer))
                continue
            for peer, part in enumerate(parts[index]):
                if peer == self.rank:
                    values[index].copy_(part)
                elif part.numel() > 0:
                    buffer = bytes_of(part)  # as bytes, because backends support few dtypes
                    work = dist.isend(buffer, self.ranks[peer], group=self._group, tag=index)
                    pending.append((work, buffer))
        for work, value, buffer in received:
            work.wait()
            if buffer is not value:
                value.copy_(buffer)
        for work, _ in pending:
            work.wait()


def node() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()
