"""A plan: one recipe, one placement and one origin for every tensor, and what it takes."""

from __future__ import annotations

import html
import json
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadstone import _core
from loadstone._base import machine
from loadstone._base.errors import Error, count_argument, make
from loadstone._base.keywords import names_keywords
from loadstone._base.text import read_text, write_text
from loadstone._execute.audit import warn_of_replaced
from loadstone._execute.report import listed_errors
from loadstone._files import remote
from loadstone._model.model_lock import model_lock
from loadstone._model.targets import PlannedTarget, planned_targets
from loadstone._plan.extra_state import ExtraState
from loadstone._plan.model_targets import ModelTargets

if TYPE_CHECKING:
    from loadstone._adapters.bitsandbytes.loading import QuantizedWeights
    from loadstone._execute.read_once import SharedReadPlan
    from loadstone._execute.report import Report


# A page of more would make a notebook of megabytes.
_NOTEBOOK_TARGETS_MAX = 3000


class Plan:
    """One recipe, one placement and one origin for every tensor; findings; predicted memory.

    Made by :func:`loadstone.plan` or :meth:`Plan.load`. Holds the model weakly. Unpickled it is
    checked against the shards, and :meth:`execute` needs ``model=``, as after :meth:`Plan.load`.
    """

    def __init__(
        self,
        core: _core.Plan,
        needs: ModelTargets | None = None,
        units: QuantizedWeights | None = None,
        in_place: bool = False,
        extra: ExtraState | None = None,
        whole: SharedReadPlan | None = None,
    ) -> None:
        needs = needs or ModelTargets([])
        self._core = core
        self._units = units
        self._in_place = in_place
        self._extra = extra or ExtraState()
        self._whole = whole
        self._forms = needs.forms  # dtype and tie of each tensor of the model, when planned
        self._wholes = needs.wholes
        self._model = weakref.ref(needs.module) if needs.module is not None else None
        self._constructor_values = dict(needs.constructor_values)
        self._held = needs.held_bytes(self, in_place)  # beside the bytes that the core counts
        if whole is not None:
            self._held["cpu"] = self._held.get("cpu", 0) + whole.held_bytes()

    @cached_property
    def targets(self) -> list[PlannedTarget]:
        """Every tensor that the model needs, in its order."""
        return planned_targets(self._core)

    @property
    def findings(self) -> list[_core.Finding]:
        """Everything the plan has to say, most severe first."""
        return self._core.findings

    @property
    def ok(self) -> bool:
        """Whether no finding is an error, so that :meth:`execute` will start."""
        return self._core.ok

    @property
    def bytes_to_read(self) -> int:
        """From the shards."""
        return self._core.bytes_to_read

    @property
    def bytes_to_write(self) -> int:
        """To the offload folder."""
        return self._core.bytes_to_write

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Bytes of the model and the load at most, per device; ``"cpu"`` includes staging.

        Memory that the model has is freed when all values are there: until then old and new count.
        """
        peak = self._core.peak_bytes
        return peak | {device: peak.get(device, 0) + size for device, size in self._held.items()}

    @property
    def device_map(self) -> dict[str, str]:
        """Module path to device, as given or computed; empty where all goes to the cpu."""
        return dict(self._core.device_map)

    def require_ok(self) -> None:
        """Raises :class:`PlanError` with all findings attached if one of them is an error.

        A weight that is stored quantized and broken is a :class:`FormatError`.
        """
        try:
            self._core.require_ok()
        except Error as error:
            error.findings = self.findings
            error.args = (f"{error}{listed_errors(self.findings)}",)
            raise

    @names_keywords
    def execute(
        self,
        *,
        model: Any = None,
        into: Any = None,
        progress: bool | Callable[[int, int], object] = False,
        threads: int | None = None,
        receipt: str | None = None,
        read_ahead_bytes: int = _core.READ_AHEAD_BYTES,
        interleave: bool = False,
    ) -> Report:
        """Loads, exactly as planned. Until the last byte is there the model is as it was.

        A parameter or buffer that has memory stays the object that it is and gets new memory, in
        its own order of strides; a buffer whose device or dtype changes is a new one, and the
        gradient of such a parameter is dropped. A plan that was made ``in_place`` writes to the
        memory that is there.

        Args:
            model: needed for a plan that was read from a file.
            into: the same, and its memory is written in place, as that of a plan made ``in_place``:
                no second copy, and whoever shares the memory sees the new values. A load that fails
                leaves some of it half-written: the error's ``half_written`` names the tensors, the
                audit does not account for them, and the next load that succeeds repairs them.
            progress: ``True`` for a bar, or a callable that gets bytes done and bytes in all.
            threads: readers, exactly so many; ``None``: few at first, then more while that makes
                the load faster, at most as many as the plan counts on. The report has ``readers``.
            receipt: ``"xxh3-128"`` or ``"sha256-tree"``: digests of all that is read, and of all
                values as they stand in memory, are in the report's ``receipt``. Their cost is in
                docs/receipt.md.
            read_ahead_bytes: how far ahead of the readers the system is asked for planned bytes
                that its page cache lacks; 0: never.
            interleave: memory of the host that the load is the first to touch comes from all
                memory nodes of the machine in turns. Off by default: of use where threads of all
                nodes read the model.

        Raises:
            PlanError: the plan holds errors; no data byte was read.
            LoadError: input or output failed, a shard changed, or memory ran out; names file,
                tensor and offset.
        """
        if model is not None and into is not None:
            raise make("plan.options", "pass the model as model= or as into=", field="into")
        given = into if into is not None else model
        subject = given if given is not None else self._model and self._model()
        if subject is None:
            raise make("plan.options", "this plan has no model: pass model=", field="model")
        with model_lock(subject):
            report = self._carry_out(
                subject,
                progress=progress,
                threads=threads,
                receipt=receipt,
                read_ahead_bytes=read_ahead_bytes,
                interleave=interleave,
                in_place=into is not None or self._in_place,
            )
            warn_of_replaced(subject)
        return report

    def _carry_out(
        self,
        model: Any,
        *,
        progress: bool | Callable[[int, int], object],
        threads: int | None,
        receipt: str | None,
        read_ahead_bytes: int,
        interleave: bool,
        in_place: bool | None = None,
    ) -> Report:
        """Loads; the caller has its turn with the model, and looks for holders of its tensors."""
        from loadstone._execute import execute as _execute

        ahead = count_argument("read_ahead_bytes", read_ahead_bytes, 2**63 - 1)
        return _execute.run(
            self,
            model,
            progress=progress,
            threads=count_argument("threads", threads or 0),
            receipt=receipt,
            in_place=in_place,
            reading={"read_ahead_bytes": ahead, "interleave": bool(interleave)},
        )

    def to_json(self) -> str:
        """The plan as text that the command line and C++ programs carry out too."""
        self._extra.require_none()
        if self._whole is not None:
            message = "a plan of ranks that read together needs them; a file cannot say so"
            raise make("plan.options", message, field="read_once")
        if self._in_place:
            message = "a plan that writes in place is tied to its model; a file cannot say so"
            raise make("plan.options", message, field="in_place")
        return self._core.to_json()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes :meth:`to_json` to a file."""
        write_text(path, self.to_json())

    @classmethod
    @names_keywords
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        allow_links: bool = False,
        root: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = "",
        offload_folder: str | os.PathLike[str] | None = None,
        allow_remote: bool = False,
    ) -> Plan:
        """Reads a plan back and checks it against the shards, trusting nothing.

        Args:
            root: the checkpoint's folder. Needed where it was moved or copied, unless it stands
                with the plan: in the plan's folder. Of a plan with adapters a list: the folder of
                each follows.
            offload_folder: where tensors placed on ``"disk"`` go. The folder that the plan names
                is not taken from a file: pass it again.
            allow_remote: read the checkpoint from the URL that the plan names. Without it no host
                is contacted (``plan.remote``); a URL as ``root`` is your own word.

        Raises:
            PlanError: the text is no plan, or a box does not fit its tensors; or the plan writes to
                disk and no ``offload_folder`` was passed (``plan.offload_folder``).
            LoadError: a shard is not the planned one (``io.changed``). One that was only modified
                at another time is a warning in ``findings`` (``io.time``).
        """
        roots = [root] if isinstance(root, str | os.PathLike) else list(root)
        first, *others = [os.fsdecode(each) for each in roots] or [""]
        core = _core.plan_from_json(
            read_text(path),
            allow_links=allow_links,
            root=first,
            other_roots=others,
            plan_folder=os.fsdecode(Path(path).parent),
            offload_folder="" if offload_folder is None else os.fsdecode(offload_folder),
            allow_remote=allow_remote,
            storage=remote.storage(),
        )
        return cls(core)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._units is not None:
            raise TypeError("a plan that fills modules of bitsandbytes is tied to its model")
        return _unpickled, (self.to_json(), str(Path.cwd()), self._core.offload_folder)

    def to_html(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        report: Report | None = None,
        max_memory: Mapping[Any, int | str] | None = None,
    ) -> str:
        """The plan as one HTML page that needs no network and no other file.

        Args:
            path: where it is written too.
            report: of this plan's execution, to see what was measured beside what was planned.
            max_memory: bytes per device (``int`` or ``"8GiB"``), shown as limits.
        """
        model = self._model() if self._model is not None else None
        page = self._core.to_html(
            type(model).__name__ if model is not None else "",
            machine.capacities(max_memory, computed=False),
            self._held,
            None if report is None else vars(report),
        )
        if path is not None:
            write_text(path, page)
        return page

    def _repr_html_(self) -> str:
        """In a notebook: the page in a frame of its own, or the table where it would be large."""
        if len(self._core) > _NOTEBOOK_TARGETS_MAX:
            return f"<pre>{html.escape(str(self))}</pre>"
        return (
            '<iframe sandbox="allow-scripts" style="width:100%;height:720px;border:0" '
            f'srcdoc="{html.escape(self.to_html())}"></iframe>'
        )

    def __str__(self) -> str:
        return self._core.to_table()

    def __repr__(self) -> str:
        errors = sum(finding.severity == "error" for finding in self.findings)
        return f"Plan({len(self.targets)} targets, {self.bytes_to_read} bytes, {errors} errors)"


def _unpickled(text: str, folder: str, offload_folder: str) -> Plan:
    """A plan as :meth:`Plan.load` reads it: checked against the shards, and without a model."""
    saved = json.loads(text)
    checkpoints = [saved, *saved.get("other_checkpoints", [])]
    roots = [each["root"] for each in checkpoints]
    # A remote folder is taken as it is: asked what it is, a host would want its files' signatures.
    root, *others = ["" if _core.is_remote(each) else str(Path(folder, each)) for each in roots]
    core = _core.plan_from_json(
        text,
        root=root,
        other_roots=others,
        offload_folder=offload_folder,
        allow_remote=True,
        storage=remote.storage(),
    )
    return Plan(core)
