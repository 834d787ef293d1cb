"""Deciding, before a data byte is read, where every tensor of a model will come from."""

from __future__ import annotations

import functools
import html
import json
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadstone import _collector, _core, _initialise, _machine, _modules, _remote
from loadstone._adapters import TRACED, trace, with_units
from loadstone._catalog import RANK_MAX, Checkpoint, inspect
from loadstone._errors import Error, count_argument, make
from loadstone._extra_state import ExtraState
from loadstone._needs import Needs, needs_of
from loadstone._policies import missing_policies
from loadstone._quantization import Quantization
from loadstone._report import listed_errors
from loadstone._rules import Rules, rules_or_recipes
from loadstone._targets import PlannedTarget, planned_targets
from loadstone._text import read_text
from loadstone._traced import Traced
from loadstone._turns import in_turn_with
from loadstone._weighted import Adapters, Weighted, adapters

if TYPE_CHECKING:
    from loadstone._bitsandbytes.loading import QuantizedWeights
    from loadstone._catalog import Catalog
    from loadstone._report import Report


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
        needs: Needs | None = None,
        units: QuantizedWeights | None = None,
        in_place: bool = False,
        extra: ExtraState | None = None,
    ) -> None:
        needs = needs or Needs([])
        self._core = core
        self._units = units
        self._in_place = in_place
        self._extra = extra or ExtraState()
        self._forms = needs.forms  # dtype and tie of each tensor of the model, when planned
        self._model = weakref.ref(needs.module) if needs.module is not None else None
        self._constructor_values = dict(needs.constructor_values)
        self._held = needs.held_bytes(self, in_place)  # beside the bytes that the core counts

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

    def execute(
        self,
        *,
        model: Any = None,
        into: Any = None,
        progress: bool | Callable[[int, int], object] = False,
        threads: int | None = None,
        receipt: str | None = None,
    ) -> Report:
        """Loads, exactly as planned. Until the last byte is there the model is as it was.

        A parameter or buffer that has memory stays the object that it is and gets new memory, in
        its own order of strides; where device or dtype change, it is a new one. A plan that was
        made ``in_place`` writes to the memory that is there.

        Args:
            model: needed for a plan that was read from a file.
            into: the same, and its memory is written in place, as that of a plan made ``in_place``:
                no second copy, and whoever shares the memory sees the new values. A load that fails
                leaves some of it half-written: the error's ``half_written`` names the tensors, the
                audit does not account for them, and the next load that succeeds repairs them.
            progress: ``True`` for a bar, or a callable that gets bytes done and bytes in all.
            threads: readers; ``None``: as many as the plan counts on.
            receipt: ``"xxh3-128"`` or ``"sha256-tree"``: digests of all that is read, and of all
                values as they stand in memory, are in the report's ``receipt``. Their cost is in
                docs/receipt.md.

        Raises:
            PlanError: the plan holds errors; no data byte was read.
            LoadError: input or output failed, a shard changed, or memory ran out; names file,
                tensor and offset.
        """
        from loadstone import _execute

        if model is not None and into is not None:
            raise make("plan.options", "pass the model as model= or as into=", field="into")
        given = into if into is not None else model
        subject = given if given is not None else self._model and self._model()
        if subject is None:
            raise make("plan.options", "this plan has no model: pass model=", field="model")
        with in_turn_with(subject):
            count = count_argument("threads", threads or 0)
            return _execute.run(
                self,
                subject,
                progress=progress,
                threads=count,
                receipt=receipt,
                in_place=into is not None or self._in_place,
            )

    def to_json(self) -> str:
        """The plan as text that the command line and C++ programs carry out too."""
        self._extra.require_none()
        if self._in_place:
            message = "a plan that writes in place is tied to its model; a file cannot say so"
            raise make("plan.options", message, field="in_place")
        return self._core.to_json()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes :meth:`to_json` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
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
            storage=_remote.storage(),
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
        loaded = None
        if report is not None:
            loaded = (report.seconds, report.bytes_read, report.staging_bytes_peak)
        page = self._core.to_html(
            type(model).__name__ if model is not None else "",
            _machine.capacities(max_memory, computed=False),
            self._held,
            loaded,
        )
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
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
    root, *others = [each if _core.is_remote(each) else str(Path(folder, each)) for each in roots]
    core = _core.plan_from_json(
        text,
        root=root,
        other_roots=others,
        offload_folder=offload_folder,
        storage=_remote.storage(),
    )
    return Plan(core)


def plan(
    model: Any,
    checkpoint: Checkpoint,
    *,
    rules: Rules | None = None,
    dtype: Any = None,
    quantize: Any = None,
    lora: Weighted = (),
    lora_ignore: str | Sequence[str] = (),
    device_map: Any = None,
    max_memory: Mapping[Any, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    missing: str | Mapping[str, str] = "error",
    unexpected: str = "warn",
    strict: bool | None = None,
    strip_prefix: str | Sequence[str] = _core.STRIP_PREFIXES,
    staging_bytes_max: int = _core.STAGING_BYTES_MAX,
    threads: int | None = None,
    allow_non_finite: bool = False,
    mmap: bool = False,
    in_place: bool = False,
    allow_links: bool = False,
) -> Plan:
    """Plans a load: reads headers, no data, and changes nothing.

    Args:
        model: an ``nn.Module`` (best built under :func:`loadstone.skeleton`), or the path of a
            skeleton file made by :func:`loadstone.save_skeleton`.
        checkpoint: see :func:`loadstone.inspect`.
        rules: what becomes of the file's names, first match wins; see ``docs/rules.md``. Or
            ``{"old.": "new."}``: literal prefixes of names, and what replaces them. Or the path of
            a JSON file of rules, or of recipes (:func:`loadstone.save_recipes`). Or
            ``"transformers"``, ``"diffusers"``: traced from that library's own conversion code for
            the model.
        quantize: ``"nf4"``, ``"fp4"`` or ``"int8"``: for the weights of all linear layers but the
            output embedding and tied ones; or regular expressions of whole names with one of these,
            or a :class:`Quantization`, each: for exactly these. See ``docs/bitsandbytes.md``.
        lora: adapters that are merged into the model's numbers on their way: a path, several, or
            a mapping of paths to factors, as for :func:`loadstone.merge`. See ``docs/merge.md``.
        lora_ignore: regular expressions of adapters' tensors to leave out. Any other tensor that
            nothing uses is an error.
        dtype: ``None``: the model's own; a torch dtype or its name: for parameters and persistent
            floating buffers, never for others; ``"auto"``: the file's.
        device_map: ``"auto"``, ``"balanced"``, ``"balanced_low_0"``, ``"sequential"``, a device, or
            a dictionary from module path to device (``"disk"`` and ``"meta"`` too).
        max_memory: bytes per device (``int`` or ``"8GiB"``).
        offload_folder: where tensors placed on ``"disk"`` go.
        missing: ``"error"``, ``"initialise"`` (the module's own initialiser), ``"zeros"`` or
            ``"keep"`` (what has memory keeps its value, origin ``kept``; what has none is an
            error); or regular expressions (RE2) of whole names with one of these each, where all
            else is an error. (``"initialize"`` is the same as ``"initialise"``.)
        unexpected: ``"warn"`` (a finding; :func:`loadstone.load` warns once), ``"error"`` or
            ``"ignore"``.
        strict: in the place of both, as for ``load_state_dict``. ``True``: what is missing or
            unexpected is an error. ``False``: ``missing="keep"`` and ``unexpected="ignore"``.
        strip_prefix: taken from the front of the checkpoint's names where all of them have it and
            the model's have not; not from names that ``rules`` match, and not from traced ones.
            Where some have it, a finding (``plan.prefix``) gives the rule to use. ``()``: names are
            left alone.
        staging_bytes_max: memory for bytes under way, beside the model's own. A load that
            quantizes takes one of its windows at least (of FP8 blocks: 128 rows), which
            ``peak_bytes`` counts.
        threads: readers that ``peak_bytes`` counts; ``None``: one per core, but few.
            :meth:`Plan.execute` may have others, in no more memory.
        allow_non_finite: go on where what is quantized holds NaN or infinities, and say so; else
            the load fails with ``q.nan``.
        mmap: hand out views of the file where nothing changes; the file must then stay as it is.
        in_place: write to the memory that parameters and buffers have, where device and dtype stay:
            addresses stay and no second copy is needed, but a load that fails leaves them
            half-written.

    Raises:
        FormatError: the checkpoint breaks a rule of its format.
        LoadError: it does not exist or cannot be read.
        Error: arguments that mean nothing (``plan.options``, ``plan.rules``). What is wrong between
            model and checkpoint is never raised here: it is in ``findings``.
    """
    if strict is not None:
        if missing != "error" or unexpected != "warn":
            message = "strict stands for missing and unexpected; pass it, or these"
            raise make("plan.options", message, field="strict", found=str(strict))
        missing, unexpected = ("error", "error") if strict else ("keep", "ignore")
    rank_max = {"gguf_rank_max": RANK_MAX} if rules == "diffusers" else {}
    catalog = inspect(checkpoint, allow_links=allow_links, **rank_max)
    is_traced = isinstance(rules, str) and (rules in TRACED or not Path(rules).exists())
    traced = trace(str(rules), model, catalog, dtype) if is_traced else None
    traced = with_units(traced, model, catalog, dtype, quantize)
    return make_plan(
        model,
        catalog,
        traced,
        adapters=adapters(lora, lora_ignore, allow_links),
        rules=None if is_traced else rules,
        dtype=None if is_traced else dtype,
        device_map=device_map,
        max_memory=max_memory,
        offload_folder=offload_folder,
        missing=missing,
        unexpected=unexpected,
        strip_prefix=strip_prefix,
        staging_bytes_max=count_argument("staging_bytes_max", staging_bytes_max, 2**63 - 1),
        threads=threads,
        allow_non_finite=allow_non_finite,
        mmap=mmap,
        runs_hooks=not is_traced,
        in_place=in_place,
    )


@_collector.paused()
def make_plan(
    model: Any,
    catalog: Catalog,
    traced: Traced | None,
    *,
    adapters: Adapters | None = None,
    rules: Rules | None = None,
    dtype: Any = None,
    device_map: Any = None,
    max_memory: Mapping[Any, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    missing: str | Mapping[str, str] = "error",
    missing_of: Mapping[str, str] | None = None,
    unexpected: str = "warn",
    threads: int | None = None,
    allow_non_finite: bool = True,
    initialises: bool = False,
    quantize: Mapping[str, Quantization] | None = None,
    strip_prefix: str | Sequence[str] = (),
    runs_hooks: bool = False,
    in_place: bool = False,
    **options: Any,
) -> Plan:
    """:func:`plan` for a checkpoint that is open, with recipes that an adapter worked out.

    Args:
        adapters, missing_of: merged into the targets; policies of single ones, by name.
        quantize: targets that become :class:`loadstone._execute.Parts`.
        allow_non_finite: libraries quantize NaN too.
        initialises: the caller does so itself.
        runs_hooks: hooks and overrides of ``load_state_dict`` have their effect.
        options: for the core: ``mmap`` ...; ``allows_unknown_modules``: of a device map, a warning.
    """
    needs, traced, merged = needs_of(model), traced or Traced(None), adapters or Adapters()
    for target in needs.targets:
        traced.adjust(target)
    if (units := traced.units) is not None:
        dtype, quantize = _take_over(units, needs, dtype), {**(quantize or {}), **units.quantize}
    needs.findings += traced.findings + traced.unexpected_findings(unexpected)
    mode, entries = _machine.device_map_entries(device_map)
    default, patterns = missing_policies(missing)
    single = dict.fromkeys(needs.outside, "keep") | dict(missing_of or {})
    prefixes = _texts("strip_prefix", strip_prefix)
    text, recipes = rules_or_recipes(rules, catalog._core)
    make_core = functools.partial(
        _core.make_plan,
        merged.behind(catalog),
        needs.targets,
        values_known=needs.module is not None,
        rules=text,
        dtype="" if dtype is None else str(dtype),
        device_map_mode=mode,
        device_map=entries,
        max_memory=_machine.capacities(max_memory, computed=bool(mode)),
        no_split_modules=_modules.no_split_paths(needs.module) if mode else [],
        offload_folder=os.fsdecode(offload_folder) if offload_folder is not None else "",
        missing=default,
        missing_patterns=patterns,
        strip_prefixes=prefixes,
        threads=count_argument("threads", threads or 0),
        allow_non_finite=allow_non_finite,
        knows_all_sources=traced.recipes is not None,
        expected_sources=list(traced.expected.items()),
        explained=[*traced.reported_missing, *traced.broken()],
        quantize=[(name, *astuple(how)) for name, how in (quantize or {}).items()],
        adapters=list(merged.rows),
        bare_modules=_modules.among(needs.module, [path for path, _ in entries]),
        **options,
    )
    given = traced.recipes if recipes is None else recipes
    core = make_core(missing_of=list(single.items()), unexpected=unexpected, recipes=given)
    effect = None
    if runs_hooks and recipes is None:
        effect = needs.of_hooks(catalog, core, text, prefixes, missing)
    if effect is not None:
        needs.findings += effect.all_findings(unexpected)
        single |= dict.fromkeys(needs.held() & effect.kept, "keep")
        core = make_core(missing_of=list(single.items()), **effect.arguments(unexpected))
    made = Plan(core, needs, units, in_place, effect.extra if effect is not None else None)
    needs.findings += units.misplaced(made.targets) if units is not None else []
    if not initialises and "initialise" in {default, *single.values(), *dict(patterns).values()}:
        needs.findings += _of_initialisers(made, needs)
    core.add_findings(needs.findings + needs.of_memory(made, in_place))
    return made


def _of_initialisers(made: Plan, needs: Needs) -> list[_core.Finding]:
    return [] if needs.module is None else _initialise.findings(made.targets, needs.module)


def _texts(field: str, values: str | Sequence[str]) -> list[str]:
    texts = [values] if isinstance(values, str) else list(values)
    for each in texts:
        if not isinstance(each, str):
            raise make("plan.options", "no text", field=field, found=repr(each))
    return texts


def _take_over(units: QuantizedWeights, needs: Needs, dtype: Any) -> Any:
    """Gives the units the targets that are theirs; the dtype for all others."""
    needs.targets = units.targets(needs.targets)
    needs.findings = [f for f in needs.findings if not units.is_state(f.target)]
    needs.findings += units.findings
    return units.dtype_left(dtype)
