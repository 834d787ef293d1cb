"""Plan the origin of every tensor of a model before any data is read."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from loadstone import _core
from loadstone._base import collector, machine
from loadstone._base.arguments import count_argument, optional_path, string_list
from loadstone._base.errors import new_error
from loadstone._files.catalog import Catalog
from loadstone._files.lora import MergedLoras
from loadstone._model import modules
from loadstone._model.ranks import local_ranks, mesh_device
from loadstone._plan import load_hooks, ties
from loadstone._plan.extensions import TargetExtension
from loadstone._plan.library_recipes import extend, with_rules_advice
from loadstone._plan.load_hooks import HookChanges
from loadstone._plan.model_memory import held_bytes, reused_bytes
from loadstone._plan.model_targets import ModelTargets, targets_of
from loadstone._plan.planned_load import PlannedLoad
from loadstone._plan.policies import missing_policies
from loadstone._plan.recipes import LibraryRecipes
from loadstone._plan.rules import Rules, rules_or_recipes
from loadstone._plan.shared_read import SharedReadPlan
from loadstone._plan.state_dict_overrides import has_code
from loadstone._skeleton import initialise


@collector.paused()
def make_plan(
    model: Any,
    catalog: Catalog,
    library_recipes: LibraryRecipes | None,
    *,
    loras: MergedLoras | None = None,
    rules: Rules | None = None,
    dtype: Any = None,
    device_map: Any = None,
    maps_tensors: bool = False,
    max_memory: Mapping[Any, int | str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    missing: str | Mapping[str, str] = "error",
    missing_of: Mapping[str, str] | None = None,
    unexpected: str = "warn",
    threads: int | None = None,
    allow_non_finite: bool = True,
    initialises: bool = False,
    quantize: Any = None,
    strip_prefix: str | Sequence[str] = (),
    runs_hooks: bool = False,
    in_place: bool = False,
    read_once: bool = False,
    **options: Any,
) -> PlannedLoad:
    """Make a plan like :func:`loadstone.plan`, for an open checkpoint and an adapter's recipes.

    Args:
        maps_tensors: ``device_map`` has the device of every tensor.
        missing_of: policies of single targets, by name.
        allow_non_finite: true by default, because libraries quantize NaN too.
        initialises: the caller runs the initialisers itself.
        runs_hooks: hooks and overrides of ``load_state_dict`` take effect.
        options: the core's; ``allows_unknown_modules`` only warns of unknown paths in a device map.
    """
    derived = extend(library_recipes, model, catalog, dtype, quantize)
    merged = loras or MergedLoras()
    model_targets = _expanded_targets(model, derived, merged.keeps_ties, unexpected)
    default, patterns = missing_policies(missing)
    policy_of = dict.fromkeys(model_targets.not_in_state_dict, "keep") | dict(missing_of or {})
    prefixes = string_list("strip_prefix", strip_prefix)
    text, recipes = rules_or_recipes(rules, catalog._core)
    extensions, hook_changes = list(derived.extensions), None
    make_core: Callable[..., _core.Plan] = functools.partial(
        _core.make_plan,
        merged.join_behind(catalog),
        values_known=model_targets.module is not None,
        rules=text,
        dtype=_core_dtype(dtype, model_targets),
        offload_folder=optional_path("offload_folder", offload_folder),
        missing=default,
        missing_patterns=patterns,
        strip_prefixes=prefixes,
        threads=count_argument("threads", threads or 0),
        local_ranks=local_ranks(),
        allow_non_finite=allow_non_finite,
        knows_all_sources=derived.recipes is not None,
        expected_sources=list(derived.expected.items()),
        explained=[*derived.already_reported, *model_targets.already_reported],
        quantize=[(name, *astuple(encoding)) for name, encoding in model_targets.quantize.items()],
        adapters=list(merged.rows),
        tie=merged.tie,
        **_devices(model_targets, device_map, max_memory, extensions if maps_tensors else ()),
        **options,
    )
    recipes = recipes or derived.recipes
    rest = {"missing_of": list(policy_of.items()), "unexpected": unexpected, "recipes": recipes}
    core = make_core(model_targets.targets, **rest)
    if runs_hooks and recipes is None:
        hook_changes = _changes_by_hooks(model_targets, catalog, core, text, prefixes, missing)
    if hook_changes is not None:
        model_targets.findings += hook_changes.all_findings(unexpected)
        policy_of |= dict.fromkeys(model_targets.held() & hook_changes.kept, "keep")
        rest = {"missing_of": list(policy_of.items()), **hook_changes.arguments(unexpected)}
        core = make_core(model_targets.targets, **rest)
        extensions += [] if hook_changes.extra is None else [hook_changes.extra]
    core = with_rules_advice(core, make_core, rest, model_targets, catalog)
    shared_read = _shared_read(make_core, rest, model_targets, catalog) if read_once else None
    policies = set() if initialises else {default, *policy_of.values(), *dict(patterns).values()}
    return _finished(core, model_targets, extensions, in_place, shared_read, policies)


def _core_dtype(dtype: Any, model_targets: ModelTargets) -> str:
    keeps_dtypes = model_targets.keeps_dtypes and dtype != "auto"
    return "" if dtype is None or keeps_dtypes else str(dtype)


def _expanded_targets(
    model: Any, derived: LibraryRecipes, keeps_ties: bool, unexpected: str
) -> ModelTargets:
    model_targets = targets_of(model)
    derived.adjust(model_targets.targets, keeps_ties)
    for extension in derived.extensions:
        extension.expand(model_targets)
    model_targets.findings += derived.findings + derived.unexpected_findings(unexpected)
    return model_targets


def _changes_by_hooks(
    model_targets: ModelTargets,
    catalog: Catalog,
    core: _core.Plan,
    rules: str,
    prefixes: list[str],
    missing: str | Mapping[str, str],
) -> HookChanges | None:
    module = model_targets.module
    is_rejected = any(finding.code == "plan.tensor_class" for finding in model_targets.findings)
    if module is None or is_rejected or not has_code(module, core):
        return None
    rules = _core.stripping_rules(catalog._core, model_targets.targets, prefixes, rules)
    return load_hooks.trace_hooks(module, catalog, core, rules, missing)


def _devices(
    model_targets: ModelTargets,
    device_map: Any,
    max_memory: Mapping[Any, int | str] | None,
    extensions: Sequence[TargetExtension],
) -> dict[str, Any]:
    for extension in extensions:
        device_map = extension.devices(device_map)
    if device_map is None:
        device_map = mesh_device(
            slot.shard for slot in model_targets.slots if slot.shard is not None
        )
    if model_targets.module is not None and isinstance(device_map, Mapping):
        device_map = modules.saved_map(model_targets.module, device_map)
    mode, entries = machine.device_map_entries(device_map)
    return {
        "device_map_mode": mode,
        "device_map": entries,
        "max_memory": machine.capacities(max_memory, computed=bool(mode)),
        "no_split_modules": modules.no_split_paths(model_targets.module) if mode else [],
        "bare_modules": modules.existing_paths(model_targets.module, [path for path, _ in entries]),
    }


def _shared_read(
    make_core: Callable[..., _core.Plan],
    arguments: Mapping[str, Any],
    model_targets: ModelTargets,
    catalog: Catalog,
) -> SharedReadPlan:
    """Plan the same load for whole tensors, which ranks read for each other."""
    if model_targets.module is None:
        message = "read_once requires the model, not a skeleton file"
        raise new_error("plan.options", message, field="read_once")
    whole_tensors = [target.whole() for target in model_targets.targets]
    shared_read = SharedReadPlan(make_core(whole_tensors, **arguments), catalog)
    shared_read.require_possible()
    return shared_read


def _finished(
    core: _core.Plan,
    model_targets: ModelTargets,
    extensions: list[TargetExtension],
    in_place: bool,
    shared_read: SharedReadPlan | None,
    policies: set[str],
) -> PlannedLoad:
    module = model_targets.module
    planned = PlannedLoad(
        core,
        None if module is None else weakref.ref(module),
        model_targets.forms,
        model_targets.whole_shapes,
        dict(model_targets.constructor_values),
        extensions=extensions,
        in_place=in_place,
        shared_read=shared_read,
    )
    targets = planned.targets
    planned.held_bytes = held = held_bytes(model_targets.slots, targets, in_place)
    if in_place:
        planned.reused_bytes = reused_bytes(model_targets.slots, targets)
    if shared_read is not None:
        held["cpu"] = held.get("cpu", 0) + shared_read.held_bytes()
    findings = model_targets.findings
    for extension in extensions:
        findings += extension.findings(targets)
    if module is not None and "initialise" in policies:
        findings += initialise.findings(targets, module)
    if any(finding.code == "merge.tie" for finding in core.findings):
        findings += ties.findings(model_targets.slots, targets)
    core.add_findings(findings + model_targets.memory_findings(targets, in_place))
    return planned
