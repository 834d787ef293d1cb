"""Plan: what callers inspect, save and execute."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from loadstone import _core
from loadstone._base import machine, user_cache
from loadstone._base.adapters import adapters_with
from loadstone._base.arguments import count_argument, optional_path, path_list
from loadstone._base.errors import new_error
from loadstone._base.keywords import names_keywords
from loadstone._base.progress import Progress
from loadstone._base.text import read_text, write_text
from loadstone._base.vocabulary import MaxMemory, Missing, ReceiptDigest, Tie, Unexpected
from loadstone._execute import execute
from loadstone._execute.audit import warn_of_replaced
from loadstone._execute.report import Report
from loadstone._files import remote
from loadstone._files.catalog import RANK_MAX, CheckpointPath, inspect
from loadstone._files.lora import Weighted, open_loras
from loadstone._model.model_lock import model_lock
from loadstone._model.modules import require_module
from loadstone._model.targets import PlannedTarget
from loadstone._plan.library_recipes import trace
from loadstone._plan.placement import Device, DeviceMap
from loadstone._plan.planned_load import PlannedLoad, require_ok
from loadstone._plan.planning import make_plan
from loadstone._plan.quantization import Quantization
from loadstone._plan.rules import Rules, is_file, is_json

# Number of targets up to which a notebook shows the page, because each adds to the notebook's size.
_NOTEBOOK_TARGETS_MAX = 3000


class Duration(NamedTuple):
    """An estimate.

    Attributes:
        seconds: ``None`` if unknown.
        excludes_computing: ``seconds`` excludes time to encode or decode values.
        text: the estimate as ``loadstone plan`` prints it, with the measurement or with the reason
            why the duration is unknown.
    """

    seconds: float | None
    excludes_computing: bool
    text: str


class Plan:
    """One recipe, one placement and one origin for every tensor; findings; predicted memory.

    Made by :func:`loadstone.plan` or :meth:`Plan.load`. Refers to the model weakly. Unpickling
    checks the plan against the shards; the plan then has no model, as after :meth:`Plan.load`, so
    :meth:`execute` needs ``model=``.
    """

    def __init__(self, planned: PlannedLoad) -> None:
        self._planned = planned
        self._shown = planned.on_this_machine(planned.reused_bytes)

    @property
    def targets(self) -> list[PlannedTarget]:
        """Every tensor that the model needs, in the model's order."""
        return self._planned.targets

    @property
    def findings(self) -> list[_core.Finding]:
        """All findings, most severe first."""
        return self._shown.findings

    @property
    def ok(self) -> bool:
        """True if no finding is an error, so that :meth:`execute` will start."""
        return self._shown.ok

    @property
    def bytes_to_read(self) -> int:
        """Bytes to read from the shards."""
        return self._planned.core.bytes_to_read

    @property
    def bytes_to_write(self) -> int:
        """Bytes to write to the offload folder."""
        return self._planned.core.bytes_to_write

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Peak bytes of the model and the load, per device; ``"cpu"`` includes staging.

        The model's old memory is freed after all values are loaded. Until then the old and the new
        memory both count.
        """
        return self._planned.peak_bytes

    @property
    def duration(self) -> Duration:
        """The estimated duration of the load, from the rates that ``loadstone bench`` measured."""
        return Duration(*self._planned.core.duration(str(user_cache.folder("bench.json"))))

    @property
    def device_map(self) -> dict[str, str]:
        """Modules with their devices, as given or computed; empty if everything is on the cpu."""
        return dict(self._planned.core.device_map)

    def require_ok(self) -> None:
        """Raise :class:`PlanError` with all findings attached if one of them is an error.

        A defective quantized weight is a :class:`FormatError`.
        """
        require_ok(self._shown)

    @names_keywords
    def execute(
        self,
        *,
        model: torch.nn.Module | None = None,
        into: torch.nn.Module | None = None,
        progress: Progress = False,
        threads: int | None = None,
        receipt: ReceiptDigest | None = None,
        read_ahead_bytes: int = _core.READ_AHEAD_BYTES,
        interleave: bool = False,
    ) -> Report:
        """Load exactly as planned. The model is unchanged until the last byte has been read.

        A parameter or buffer that has memory stays the same object and gets new memory, with the
        same stride order. If its device or dtype changes, a buffer is replaced, and a parameter
        loses its gradient. A plan made with ``in_place`` writes to the existing memory.

        Args:
            model: needed for a plan that was read from a file.
            into: like ``model``, but writes to the model's existing memory, like a plan made with
                ``in_place``: no second copy, and tensors that share the memory see the new values.
                A failed load leaves some of it half-written: the error's ``half_written`` names the
                tensors, the audit does not account for them, and the next load that succeeds
                repairs them.
            progress: ``True`` for a bar, or a callable with arguments bytes done and total bytes.
            threads: the exact number of readers; ``None``: few at first, then more as long as that
                is faster, up to the number in the plan. ``readers`` of the report is the final
                number.
            receipt: ``"xxh3-128"`` or ``"sha256-tree"``: ``receipt`` of the report has digests of
                all bytes read, and of all values in memory. Their cost is in docs/receipt.md.
            read_ahead_bytes: distance ahead of the readers at which loadstone requests planned
                bytes that the system's page cache lacks; 0: never.
            interleave: allocate new host memory across all memory nodes of the machine. Useful if
                threads of all nodes read the model.

        Raises:
            PlanError: the plan has errors; no data was read.
            LoadError: input or output failed, a shard changed, or memory ran out; names file,
                tensor and offset.
        """
        if model is not None and into is not None:
            raise new_error("plan.options", "pass the model as model= or as into=", field="into")
        options = execute.ExecuteOptions(progress, threads, receipt, read_ahead_bytes, interleave)
        target_model = model if into is None else into
        if target_model is None:
            target_model = self._model()
        if target_model is None:
            raise new_error("plan.options", "this plan has no model: pass model=", field="model")
        require_module(target_model)
        in_place = True if into is not None else None
        report = execute.execute_plan(self._planned, target_model, options, in_place=in_place)
        warn_of_replaced(target_model)
        return report

    def _model(self) -> Any:
        """Return the planned model; ``None`` if it was freed, or the plan came from a file."""
        return None if self._planned.model is None else self._planned.model()

    def to_json(self) -> str:
        """Return the plan as JSON, which the command and C++ programs can execute too."""
        for extension in self._planned.extensions:
            extension.require_savable(is_pickled=False)
        if self._planned.shared_read is not None:
            message = "a plan with read_once cannot be saved: it requires its process group"
            raise new_error("plan.options", message, field="read_once")
        if self._planned.in_place:
            message = "a plan with in_place=True cannot be saved: it requires its model"
            raise new_error("plan.options", message, field="in_place")
        return self._planned.core.to_json()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_json` to a file."""
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
        max_memory: MaxMemory | None = None,
    ) -> Plan:
        """Read a saved plan, and check it against the shards without trusting it.

        Args:
            root: the checkpoint's folder. Needed if it was moved or copied, unless the plan's
                folder has the shards. For a plan with adapters a list, with the adapters' folders
                after the checkpoint's.
            offload_folder: folder for tensors placed on ``"disk"``. loadstone does not trust the
                folder in the file: pass it again.
            allow_remote: read the checkpoint from the URL in the plan. Without it loadstone
                contacts no host (``plan.remote``), except for a URL that you pass as ``root``.
            max_memory: the limit of ``"cpu"`` replaces the free memory of this machine, with which
                the plan is compared; ``{"cpu": "unlimited"}`` allows any size.

        Raises:
            PlanError: the text is not a plan, or a box does not fit its tensors; or the plan writes
                to disk and no ``offload_folder`` was passed (``plan.offload_folder``).
            LoadError: a shard is not the planned one (``io.changed``). A shard that differs only in
                its modification time is a warning in ``findings`` (``io.time``).
        """
        planned = _plan_from_json(
            read_text(path),
            path_list("root", root) or [""],
            allow_links=allow_links,
            plan_folder=os.fsdecode(Path(path).parent),
            offload_folder=optional_path("offload_folder", offload_folder),
            allow_remote=allow_remote,
        )
        planned.memory_limit = _host_limit(max_memory)
        return cls(planned)

    def __reduce__(self) -> tuple[Any, ...]:
        for extension in self._planned.extensions:
            extension.require_savable(is_pickled=True)
        return _unpickled, (self.to_json(), str(Path.cwd()), self._planned.core.offload_folder)

    def to_html(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        report: Report | None = None,
        max_memory: MaxMemory | None = None,
    ) -> str:
        """Return the plan as one HTML page that needs no network and no other files.

        Args:
            path: file to write the page to, too.
            report: report of this plan's execution, to compare measured with planned values.
            max_memory: bytes per device (``int`` or ``"8GiB"``), shown as limits.
        """
        model = self._model()
        page = self._shown.to_html(
            type(model).__name__ if model is not None else "",
            [
                (device, size)
                for device, size in machine.capacities(max_memory, computed=False)
                if size != _core.MEMORY_UNLIMITED
            ],
            self._planned.held_bytes,
            None if report is None else vars(report),
        )
        if path is not None:
            write_text(path, page)
        return page

    def _repr_html_(self) -> str:
        """Return the page in a frame, or the plan as text if the page would be large."""
        if len(self._planned.core) > _NOTEBOOK_TARGETS_MAX:
            return f"<pre>{html.escape(str(self))}</pre>"
        return (
            '<iframe sandbox="allow-scripts" style="width:100%;height:720px;border:0" '
            f'srcdoc="{html.escape(self.to_html())}"></iframe>'
        )

    def __str__(self) -> str:
        return self._shown.to_table()

    def __repr__(self) -> str:
        errors = sum(finding.severity == "error" for finding in self.findings)
        return f"Plan({len(self.targets)} targets, {self.bytes_to_read} bytes, {errors} errors)"


@names_keywords
def plan(
    model: torch.nn.Module | str | os.PathLike[str],
    checkpoint: CheckpointPath,
    *,
    rules: Rules | None = None,
    dtype: torch.dtype | str | None = None,
    quantize: str | Mapping[str, str | Quantization] | None = None,
    lora: Weighted = (),
    lora_ignore: str | Sequence[str] = (),
    tie: Tie = "split",
    device_map: Device | DeviceMap | None = None,
    max_memory: MaxMemory | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    missing: Missing = "error",
    unexpected: Unexpected = "warn",
    strict: bool | None = None,
    strip_prefix: str | Sequence[str] = _core.STRIP_PREFIXES,
    staging_bytes_max: int = _core.STAGING_BYTES_MAX,
    threads: int | None = None,
    allow_non_finite: bool = False,
    mmap: bool = False,
    in_place: bool = False,
    read_once: bool = False,
    allow_links: bool = False,
) -> Plan:
    """Plan a load: read headers, no data, and change nothing.

    Args:
        model: an ``nn.Module`` (best built under :func:`loadstone.skeleton`), or the path of a
            skeleton file made by :func:`loadstone.save_skeleton`.
        checkpoint: see :func:`loadstone.inspect`.
        rules: map the file's names; the first match wins; see ``docs/rules.md``. Or
            ``{"old.": "new."}``: literal prefixes of names, and their replacements. Or the path of
            a JSON file of rules, or of recipes (:func:`loadstone.save_recipes`), or its text. Or
            ``"transformers"``, ``"diffusers"``: traced from that library's own conversion code for
            the model.
        quantize: ``"nf4"``, ``"fp4"`` or ``"int8"``: for the weights of all linear layers except
            the output embedding and tied ones; or a mapping from regular expressions of whole names
            to one of these or a :class:`Quantization`: for exactly the weights that match. See
            ``docs/bitsandbytes.md``.
        lora: adapters that the load merges into the model's values: a path, several, or a
            mapping of paths to factors, as for :func:`loadstone.merge`. See ``docs/merge.md``.
        lora_ignore: regular expressions of adapters' tensors to leave out. Any other tensor that
            nothing uses is an error.
        tie: if an adapter changes one name of a tied tensor: ``"split"``: the other names keep the
            base's value as separate tensors, as in training; ``"keep"``: all names change.
        dtype: ``None``: the model's own; a torch dtype or its name: for parameters and persistent
            floating buffers only; ``"auto"``: the file's.
        device_map: ``"auto"``, ``"balanced"``, ``"balanced_low_0"``, ``"sequential"``, a device, or
            a dictionary from module path to device (``"disk"`` and ``"meta"`` too).
        max_memory: bytes per device (``int`` or ``"8GiB"``). Without a limit for ``"cpu"`` the load
            must fit this machine's free memory (finding ``memory.host``); ``"unlimited"`` allows
            any size.
        offload_folder: folder for tensors placed on ``"disk"``.
        missing: ``"error"``, ``"initialise"`` (the module's own initialiser), ``"zeros"`` or
            ``"keep"`` (a tensor with memory keeps its value, origin ``kept``; one without is an
            error); or a mapping from regular expressions (RE2) of whole names to one of these;
            any other missing tensor is an error. (``"initialize"`` equals ``"initialise"``.)
        unexpected: ``"warn"`` (a finding; :func:`loadstone.load` warns once), ``"error"`` or
            ``"ignore"``.
        strict: replaces ``missing`` and ``unexpected``, as for ``load_state_dict``. ``True``: both
            are ``"error"``. ``False``: ``missing="keep"``, ``unexpected="ignore"``.
        strip_prefix: prefixes to remove from the checkpoint's names, if all have the prefix and the
            model's do not; names that ``rules`` match and traced names keep it. If only some have
            it, a finding (``plan.prefix``) gives the rule to use. ``()``: keep names.
        staging_bytes_max: memory for bytes in flight, next to the model's own. A load that
            quantizes needs at least one of its windows (for FP8 blocks: 128 rows), which
            ``peak_bytes`` counts. The limit includes pinned memory for GPUs; the ranks of one
            machine share it (``LOCAL_WORLD_SIZE`` of them; ``docs/how-to/gpus.md``).
        threads: readers that ``peak_bytes`` counts; ``None``: one per core, at least 4 and at most
            16. :meth:`Plan.execute` may use a different number, within the same memory.
        allow_non_finite: continue, with a finding, if values to quantize are not finite, or merged
            values are too large for their dtype; else the load fails with ``q.nan`` or
            ``convert.overflow``.
        mmap: use views of the file for unchanged tensors; the file must then not change.
            Files of network file systems are copied.
        in_place: write to the existing memory of parameters and buffers whose device and dtype do
            not change: addresses stay valid and no second copy is needed, but a failed load leaves
            them half-written.
        read_once: the ranks of the default process group on this machine read each byte once and
            send each other their slices. All must plan and execute the same load. See
            ``docs/how-to/ranks.md``.

    Raises:
        FormatError: the checkpoint breaks a rule of its format.
        LoadError: it does not exist or cannot be read.
        OptionError: invalid arguments (``plan.options``).
        PlanError: invalid rules (``plan.rules``). Mismatches between model and checkpoint are never
            raised here: they are in ``findings``.
    """
    return Plan(_planned(**locals()))


def _planned(
    model: Any,
    checkpoint: CheckpointPath,
    *,
    rules: Rules | None,
    dtype: torch.dtype | str | None,
    quantize: str | Mapping[str, str | Quantization] | None,
    lora: Weighted,
    lora_ignore: str | Sequence[str],
    tie: Tie,
    strict: bool | None,
    staging_bytes_max: int,
    allow_links: bool,
    **options: Any,
) -> PlannedLoad:
    if not isinstance(model, str | os.PathLike):
        require_module(model)
    if strict is not None:
        if options["missing"] != "error" or options["unexpected"] != "warn":
            message = "strict replaces missing and unexpected: pass strict, or the other two"
            raise new_error("plan.options", message, field="strict", found=str(strict))
        missing, unexpected = ("error", "error") if strict else ("keep", "ignore")
        options |= {"missing": missing, "unexpected": unexpected}
    catalog = inspect(checkpoint, allow_links=allow_links, gguf_rank_max=RANK_MAX)
    is_written = isinstance(rules, str) and (is_json(rules) or is_file(rules))
    is_traced = isinstance(rules, str) and (rules in adapters_with("recipes") or not is_written)
    with model_lock(model):  # trace() and make_plan() share one walk over the model
        traced = trace(str(rules), model, catalog, dtype) if is_traced else None
        planned = make_plan(
            model,
            catalog,
            traced,
            loras=open_loras(lora, lora_ignore, allow_links, tie),
            quantize=quantize,
            rules=None if is_traced else rules,
            dtype=None if is_traced else dtype,
            staging_bytes_max=count_argument("staging_bytes_max", staging_bytes_max, 2**63 - 1),
            runs_hooks=not is_traced,
            **options,
        )
    mode, _ = machine.device_map_entries(options["device_map"])
    if not mode and _host_limit(options["max_memory"]) is None:
        planned.memory_limit = None  # no other limit applies
    return planned


def _host_limit(max_memory: MaxMemory | None) -> int | None:
    return dict(machine.capacities(max_memory, computed=False)).get("cpu")


def _unpickled(text: str, folder: str, offload_folder: str) -> Plan:
    """Read a plan as :meth:`Plan.load` does: checked against the shards, without a model."""
    plan = json.loads(text)
    checkpoints = [plan, *plan.get("other_checkpoints", [])]
    # An empty root makes the core use the URL in the plan.
    roots = [
        "" if _core.is_remote(checkpoint["root"]) else str(Path(folder, checkpoint["root"]))
        for checkpoint in checkpoints
    ]
    planned = _plan_from_json(text, roots, offload_folder=offload_folder, allow_remote=True)
    planned.memory_limit = None
    return Plan(planned)


def _plan_from_json(text: str, roots: list[str], **options: Any) -> PlannedLoad:
    root, *others = roots
    storage = remote.storage()
    core = _core.plan_from_json(text, root=root, other_roots=others, storage=storage, **options)
    return PlannedLoad(core)
