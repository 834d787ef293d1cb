"""Deciding, before a data byte is read, where every tensor of a model will come from."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from loadstone import _core
from loadstone._base import collector, machine
from loadstone._base.errors import count_argument, make
from loadstone._base.keywords import names_keywords
from loadstone._execute import ties
from loadstone._files.catalog import RANK_MAX, Checkpoint, inspect
from loadstone._files.weighted import Adapters, Weighted, adapters
from loadstone._model import modules
from loadstone._model.model_lock import model_lock
from loadstone._model.ranks import local_ranks, mesh_device
from loadstone._plan.model_targets import ModelTargets, targets_of
from loadstone._plan.plan import Plan
from loadstone._plan.policies import missing_policies
from loadstone._plan.quantization import Quantization
from loadstone._plan.recipes import AdapterRecipes
from loadstone._plan.registry import TRACED, trace, with_units
from loadstone._plan.rules import Rules, is_file, is_json, rules_or_recipes
from loadstone._skeleton import initialise

if TYPE_CHECKING:
    from loadstone._adapters.bitsandbytes.loading import QuantizedWeights
    from loadstone._execute.read_once import SharedReadPlan
    from loadstone._files.catalog import Catalog
    from loadstone._plan.load_hooks import Effect


@names_keywords
def plan(
    model: Any,
    checkpoint: Checkpoint,
    *,
    rules: Rules | None = None,
    dtype: Any = None,
    quantize: Any = None,
    lora: Weighted = (),
    lora_ignore: str | Sequence[str] = (),
    tie: str = "split",
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
    read_once: bool = False,
    allow_links: bool = False,
) -> Plan:
    """Plans a load: reads headers, no data, and changes nothing.

    Args:
        model: an ``nn.Module`` (best built under :func:`loadstone.skeleton`), or the path of a
            skeleton file made by :func:`loadstone.save_skeleton`.
        checkpoint: see :func:`loadstone.inspect`.
        rules: what becomes of the file's names, first match wins; see ``docs/rules.md``. Or
            ``{"old.": "new."}``: literal prefixes of names, and what replaces them. Or the path of
            a JSON file of rules, or of recipes (:func:`loadstone.save_recipes`), or its text. Or
            ``"transformers"``, ``"diffusers"``: traced from that library's own conversion code for
            the model.
        quantize: ``"nf4"``, ``"fp4"`` or ``"int8"``: for the weights of all linear layers but the
            output embedding and tied ones; or regular expressions of whole names with one of these,
            or a :class:`Quantization`, each: for exactly these. See ``docs/bitsandbytes.md``.
        lora: adapters that are merged into the model's numbers on their way: a path, several, or
            a mapping of paths to factors, as for :func:`loadstone.merge`. See ``docs/merge.md``.
        lora_ignore: regular expressions of adapters' tensors to leave out. Any other tensor that
            nothing uses is an error.
        tie: ``"split"``: of a tied tensor that an adapter changes under one name, the other names
            keep the base's value as tensors of their own, as in training; ``"keep"``: all names
            change.
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
            ``peak_bytes`` counts. Pinned memory on the way to GPUs is a part of it, which ranks of
            one machine share (``LOCAL_WORLD_SIZE`` of them; ``docs/how-to/gpus.md``).
        threads: readers that ``peak_bytes`` counts; ``None``: one per core, at least 4 and at most
            16. :meth:`Plan.execute` may have others, in no more memory.
        allow_non_finite: go on, with a finding, if values to quantize are not finite, or merged
            values are too large for their dtype; else the load fails with ``q.nan`` or
            ``convert.overflow``.
        mmap: hand out views of the file where nothing changes; the file must then stay as it is.
            Files of network file systems are copied.
        in_place: write to the memory that parameters and buffers have, where device and dtype stay:
            addresses stay and no second copy is needed, but a load that fails leaves them
            half-written.
        read_once: ranks of the default process group that run on this machine read each byte once
            and send each other their slices. All of them plan and execute the same load. See
            ``docs/how-to/ranks.md``.

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
    is_written = isinstance(rules, str) and (is_json(rules) or is_file(rules))
    is_traced = isinstance(rules, str) and (rules in TRACED or not is_written)
    with model_lock(model):  # one walk over it
        traced = trace(str(rules), model, catalog, dtype) if is_traced else None
        traced = with_units(traced, model, catalog, dtype, quantize)
        return make_plan(
            model,
            catalog,
            traced,
            adapters=adapters(lora, lora_ignore, allow_links, tie),
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
            read_once=read_once,
        )


@collector.paused()
def make_plan(
    model: Any,
    catalog: Catalog,
    traced: AdapterRecipes | None,
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
    read_once: bool = False,
    **options: Any,
) -> Plan:
    """:func:`plan` for a checkpoint that is open, with recipes that an adapter worked out.

    Args:
        adapters, missing_of: merged into the targets; policies of single ones, by name.
        quantize: targets that become :class:`loadstone._execute.execute.Parts`.
        allow_non_finite, initialises: libraries quantize NaN too; the caller does so itself.
        runs_hooks: hooks and overrides of ``load_state_dict`` have their effect.
        options: for the core: ``mmap`` ...; ``allows_unknown_modules``: of a device map, a warning.
    """
    needs, merged = targets_of(model), adapters or Adapters()
    traced = traced or AdapterRecipes(None)
    traced.adjust(needs.targets, merged.keeps_ties)
    if (units := traced.units) is not None:
        dtype, quantize = _take_over(units, needs, dtype), {**(quantize or {}), **units.quantize}
    needs.findings += traced.findings + traced.unexpected_findings(unexpected)
    default, patterns = missing_policies(missing)
    single = dict.fromkeys(needs.outside, "keep") | dict(missing_of or {})
    prefixes, (text, recipes) = _prefixes(strip_prefix), rules_or_recipes(rules, catalog._core)
    make_core: Callable[..., _core.Plan] = functools.partial(
        _core.make_plan,
        merged.behind(catalog),
        values_known=needs.module is not None,
        rules=text,
        dtype="" if dtype is None else str(dtype),
        offload_folder=os.fsdecode(offload_folder) if offload_folder is not None else "",
        missing=default,
        missing_patterns=patterns,
        strip_prefixes=prefixes,
        threads=count_argument("threads", threads or 0),
        local_ranks=local_ranks(),
        allow_non_finite=allow_non_finite,
        knows_all_sources=traced.recipes is not None,
        expected_sources=list(traced.expected.items()),
        explained=[*traced.reported_missing, *traced.broken()],
        quantize=[(name, *astuple(how)) for name, how in (quantize or {}).items()],
        adapters=list(merged.rows),
        tie=merged.tie,
        **_devices(needs, device_map, max_memory),
        **options,
    )
    given = recipes or traced.recipes
    last = {"missing_of": list(single.items()), "unexpected": unexpected, "recipes": given}
    core = make_core(needs.targets, **last)
    runs = runs_hooks and given is None
    effect = needs.of_hooks(catalog, core, text, prefixes, missing) if runs else None
    if effect is not None:
        needs.findings += effect.all_findings(unexpected)
        single |= dict.fromkeys(needs.held() & effect.kept, "keep")
        last = {"missing_of": list(single.items()), **effect.arguments(unexpected)}
        core = make_core(needs.targets, **last)
    whole = _whole(functools.partial(make_core, **last), needs, catalog) if read_once else None
    policies = {default, *single.values(), *dict(patterns).values()}
    policies = set() if initialises else policies
    return _finished(core, needs, units, in_place, effect, policies, whole)


def _devices(
    needs: ModelTargets, device_map: Any, max_memory: Mapping[Any, int | str] | None
) -> dict[str, Any]:
    """What the core is told of devices, and of the modules that maps name."""
    if device_map is None:
        device_map = mesh_device(needs.slots)
    if needs.module is not None and isinstance(device_map, Mapping):
        device_map = modules.saved_map(needs.module, device_map)
    mode, entries = machine.device_map_entries(device_map)
    return {
        "device_map_mode": mode,
        "device_map": entries,
        "max_memory": machine.capacities(max_memory, computed=bool(mode)),
        "no_split_modules": modules.no_split_paths(needs.module) if mode else [],
        "bare_modules": modules.among(needs.module, [path for path, _ in entries]),
    }


def _whole(
    core_of: Callable[..., _core.Plan], needs: ModelTargets, catalog: Catalog
) -> SharedReadPlan:
    """The same plan for whole tensors, which ranks read for each other."""
    from loadstone._execute.read_once import SharedReadPlan

    if needs.module is None:
        message = "ranks that read together need the model, not a file about it"
        raise make("plan.options", message, field="read_once")
    made = SharedReadPlan(core_of([target.whole() for target in needs.targets]), catalog)
    made.require_possible()
    return made


def _finished(
    core: _core.Plan,
    needs: ModelTargets,
    units: QuantizedWeights | None,
    in_place: bool,
    effect: Effect | None,
    policies: set[str],
    whole: SharedReadPlan | None,
) -> Plan:
    """The plan, with the findings that need it."""
    extra = effect.extra if effect is not None else None
    made = Plan(core, needs, units, in_place, extra, whole)
    needs.findings += units.misplaced(made.targets) if units is not None else []
    if needs.module is not None and "initialise" in policies:
        needs.findings += initialise.findings(made.targets, needs.module)
    if any(finding.code == "merge.tie" for finding in core.findings):
        needs.findings += ties.findings(needs.slots, made.targets)
    core.add_findings(needs.findings + needs.of_memory(made, in_place))
    return made


def _prefixes(values: str | Sequence[str]) -> list[str]:
    texts = [values] if isinstance(values, str) else list(values)
    for each in texts:
        if not isinstance(each, str):
            raise make("plan.options", "no text", field="strip_prefix", found=repr(each))
    return texts


def _take_over(units: QuantizedWeights, needs: ModelTargets, dtype: Any) -> Any:
    """Gives the units the targets that are theirs; the dtype for all others."""
    needs.targets = units.targets(needs.targets)
    needs.findings = [f for f in needs.findings if not units.is_state(f.target)]
    needs.findings += units.findings
    return units.dtype_left(dtype)
