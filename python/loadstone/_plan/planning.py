"""Deciding, before a data byte is read, where every tensor of a model will come from."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from loadstone import _core
from loadstone._base import collector, machine
from loadstone._base.errors import count_argument, make
from loadstone._files.catalog import Catalog
from loadstone._files.weighted import Adapters
from loadstone._model import modules
from loadstone._model.ranks import local_ranks, mesh_device
from loadstone._plan import ties
from loadstone._plan.extra_state import ExtraState
from loadstone._plan.model_targets import ModelTargets, targets_of
from loadstone._plan.planned_load import PlannedLoad
from loadstone._plan.policies import missing_policies
from loadstone._plan.quantization import Quantization
from loadstone._plan.recipes import AdapterRecipes
from loadstone._plan.rules import Rules, rules_or_recipes
from loadstone._plan.shared_read import SharedReadPlan
from loadstone._skeleton import initialise


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
) -> PlannedLoad:
    """:func:`loadstone.plan` for a checkpoint that is open, with recipes of an adapter.

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
    planned = PlannedLoad(
        core,
        None if needs.module is None else weakref.ref(needs.module),
        needs.forms,
        needs.whole_shapes,
        dict(needs.constructor_values),
        units=units,
        extra=ExtraState() if effect is None else effect.extra,
        in_place=in_place,
    )
    if read_once:
        again = functools.partial(make_core, **last)
        planned.shared_read = _shared_read(again, needs, catalog)
    policies = {default, *single.values(), *dict(patterns).values()}
    return _finished(planned, needs, set() if initialises else policies)


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


def _shared_read(
    core_of: Callable[..., _core.Plan], needs: ModelTargets, catalog: Catalog
) -> SharedReadPlan:
    """The same plan for whole tensors, which ranks read for each other."""
    if needs.module is None:
        message = "ranks that read together need the model, not a file about it"
        raise make("plan.options", message, field="read_once")
    made = SharedReadPlan(core_of([target.whole() for target in needs.targets]), catalog)
    made.require_possible()
    return made


def _finished(planned: PlannedLoad, needs: ModelTargets, policies: set[str]) -> PlannedLoad:
    """With the findings and the memory that follow from what is planned for the targets."""
    core, targets = planned.core, planned.targets
    planned.held_bytes = needs.held_bytes(targets, planned.in_place)
    if planned.shared_read is not None:
        planned.held_bytes["cpu"] = (
            planned.held_bytes.get("cpu", 0) + planned.shared_read.held_bytes()
        )
    if planned.units is not None:
        needs.findings += planned.units.misplaced(targets)
    if needs.module is not None and "initialise" in policies:
        needs.findings += initialise.findings(targets, needs.module)
    if any(finding.code == "merge.tie" for finding in core.findings):
        needs.findings += ties.findings(needs.slots, targets)
    core.add_findings(needs.findings + needs.of_memory(targets, planned.in_place))
    return planned


def _prefixes(values: str | Sequence[str]) -> list[str]:
    texts = [values] if isinstance(values, str) else list(values)
    for each in texts:
        if not isinstance(each, str):
            raise make("plan.options", "no text", field="strip_prefix", found=repr(each))
    return texts


def _take_over(units: Any, needs: ModelTargets, dtype: Any) -> Any:
    """Gives the units the targets that are theirs; the dtype for all others."""
    needs.targets = units.targets(needs.targets)
    needs.findings = [f for f in needs.findings if not units.is_state(f.target)]
    needs.findings += units.findings
    return units.dtype_left(dtype)
