"""Trace code that ``load_state_dict`` would run: hooks, overrides, ``_version``, extra state.

``load_state_dict`` itself runs on a stand-in of the model and a state dict of symbols, and the
tracer records each copy into a tensor. The plan handles tensors that are copied unchanged;
a tensor that a hook renames, cuts, casts or makes gets a recipe. Code that reads values or changes
its module is rejected by name.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from loadstone import _core
from loadstone._base.errors import Error, new_error
from loadstone._base.names import parent_name
from loadstone._base.torch_modes import ordinary_tensors
from loadstone._files.catalog import Catalog
from loadstone._model.model_lock import slots_of
from loadstone._model.modules import named_modules, saved_path
from loadstone._model.targets import SAVED, planned_targets
from loadstone._plan.extra_state import ExtraState
from loadstone._plan.model_symbol import OwnSymbol, WholeSymbol
from loadstone._plan.policies import policies_of
from loadstone._plan.recipes import LibraryRecipes
from loadstone._plan.state_dict_overrides import (
    LOAD_HOOK,
    is_filled,
    is_overridden,
    is_own,
    refusal,
)
from loadstone._plan.state_symbols import StateSymbols
from loadstone._skeleton.stand_in import WriteGuard, stand_in
from loadstone.tracing import Symbol, Trace
from loadstone.tracing._trace import sources_of, symbols_in

_Module = torch.nn.Module
_REGISTRIES = ("_parameters", "_buffers", "_modules")


@dataclass
class HookChanges:
    """Changes that the model's own code makes to a load.

    Attributes:
        findings: if one is an error, the other attributes are empty.
        dropped: tensors of the checkpoint that the code removes from the state dict.
        unexpected: pairs of a name in the state dict and the name in the checkpoint; ``None``: the
            same tensors as in the plan.
        kept: tensors that keep their values if the checkpoint lacks them.
    """

    findings: list[_core.Finding] = field(default_factory=list)
    recipes: _core.Recipes | None = None
    dropped: list[str] = field(default_factory=list)
    unexpected: list[tuple[str, str]] | None = None
    kept: frozenset[str] = frozenset()
    extra: ExtraState | None = None

    def arguments(self, unexpected: str) -> dict[str, Any]:
        return {
            "recipes": self.recipes,
            "known_sources": self.dropped,
            "unexpected": unexpected if self.unexpected is None else "ignore",
        }

    def all_findings(self, unexpected: str) -> list[_core.Finding]:
        left = LibraryRecipes(None, unexpected=self.unexpected or [])
        return self.findings + left.unexpected_findings(unexpected)


def trace_hooks(
    model: _Module,
    catalog: Catalog,
    core: _core.Plan,
    rules: str,
    missing: str | Mapping[str, str],
) -> HookChanges | None:
    """Return the changes that hooks and overrides make; ``None``: they change nothing.

    ``core`` is the plan without these changes, ``rules`` its rules as JSON, prefixes included.
    """
    with ordinary_tensors():
        tracer = LoadHookTracer(model, catalog, core, rules)
        try:
            problem = tracer.run()
        except _ShapesDifferError:
            return None
        return tracer.changes(missing) if problem is None else HookChanges([problem])


class _ShapesDifferError(Exception):
    """Raised if shapes differ; the plan already has a finding for the difference."""


class LoadHookTracer:
    """Runs ``load_state_dict`` of a stand-in and records each copy into a tensor."""

    def __init__(
        self,
        model: _Module,
        catalog: Catalog,
        core: _core.Plan,
        rules: str,
    ) -> None:
        self.model = model
        self.catalog = catalog
        self.core = core
        self.targets = {target.name: target for target in planned_targets(core)}
        for slot in slots_of(model):  # hooks see whole tensors; the plan cuts them to slices
            if slot.shard is not None and slot.name in self.targets:
                target = dataclasses.replace(self.targets[slot.name], shape=slot.shape)
                self.targets[slot.name] = target
        self.trace = Trace(catalog)
        self.symbols = StateSymbols(self.trace, catalog, rules, self.targets)
        self.copied: dict[str, list[torch.Tensor]] = {}
        self.extra: dict[str, Any] = {}
        self.filled_prefixes: tuple[str, ...] = ()
        self.missing: list[str] = []
        self.unexpected: list[str] = []

    def run(self) -> _core.Finding | None:
        """Run the code; return the finding that rejects it, or ``None``."""
        try:
            copy = stand_in(self.model, lambda slot: OwnSymbol(self.trace, slot, self.copied))
        except Exception as error:
            reason = (
                f"loadstone cannot copy the model to examine the code ({type(error).__name__}: "
                f"{error})"
            )
            return refusal("", self.model, reason)
        self.filled_prefixes = self._prepare(copy)
        modules = dict(copy.named_modules())
        before = {path: _attributes(module) for path, module in modules.items()}
        attributes = {path: _attributes(module) for path, module in self.model.named_modules()}
        keys, failure = None, None
        writes = WriteGuard(self.model)
        try:
            with writes, torch.no_grad():
                keys = copy.load_state_dict(self.symbols.copy(), strict=False)
        except Exception as error:
            failure = self._refusal(error)
        for refused in (*writes.refused, *self.trace.refused):  # includes errors that were caught
            failure = failure or self._refusal(refused)
        for path, module in self.model.named_modules():
            if _attributes(module) != attributes.get(path):
                return self._make_finding(path, "the code would change the model itself")
        for path, module in modules.items():
            if _attributes(module) != before[path]:
                return self._make_finding(path, "the code would change the module")
        if failure is not None:
            return failure
        self._note_unused(keys)
        return None

    def _note_unused(self, keys: Any) -> None:
        """Record missing and unexpected names; an override may have handled only some names."""
        if not is_overridden(self.model):
            self.missing = [saved_path(self.model, name) for name in keys.missing_keys]
            unexpected = (saved_path(self.model, name) for name in keys.unexpected_keys)
            self.unexpected = [n for n in unexpected if not n.startswith(self.filled_prefixes)]
            return
        self.missing = [name for name in self.targets if name not in self.copied]
        copies = (value for values in self.copied.values() for value in values)
        used = set(sources_of(symbols_in([*self.extra.values(), *copies])))
        state = self.symbols.state.items()
        self.unexpected = [name for name, symbol in state if symbol.source not in used]

    def _prepare(self, copy: _Module) -> tuple[str, ...]:
        """Remove modules that an adapter fills; return their prefixes. Record extra state."""
        prefixes = []
        for path, module in list(copy.named_modules()):
            if is_filled(module) and path:
                owner, _, leaf = path.rpartition(".")
                copy.get_submodule(owner)._modules[leaf] = _Module()
                prefixes.append(f"{saved_path(copy, path)}.")
            elif is_own(module, "set_extra_state"):
                note = types.MethodType(self.extra.__setitem__, saved_path(copy, path))
                module.__dict__["set_extra_state"] = note
        return tuple(prefixes)

    def _refusal(self, error: Exception) -> _core.Finding:
        """Return a finding that names the module of the innermost call with a ``prefix``."""
        codes = {finding.code for finding in self.core.findings if finding.severity == "error"}
        if "size mismatch for" in str(error) and codes - {"plan.missing", "plan.unexpected"}:
            raise _ShapesDifferError from error
        path, frames = "", error.__traceback__
        while frames is not None:
            prefix = frames.tb_frame.f_locals.get("prefix")
            path = prefix.rstrip(".") if isinstance(prefix, str) else path
            frames = frames.tb_next
        reason = f"the code cannot run without values ({type(error).__name__}: {error})"
        return self._make_finding(path, reason)

    def _make_finding(self, path: str, reason: str) -> _core.Finding:
        try:
            module = self.model.get_submodule(path)
            return refusal(saved_path(self.model, path), module, reason)
        except AttributeError:  # the prefix belongs to the checkpoint or to a hook
            return refusal("", self.model, reason)

    def changes(self, missing: str | Mapping[str, str]) -> HookChanges | None:
        changes = HookChanges()
        try:
            changed = self._add_recipes(changes)
        except Error as error:
            reason = f"{error.tensor}: {error.message}"
            return HookChanges([self._make_finding(parent_name(error.tensor), reason)])
        extra, findings = self._extra_state(missing)
        changes.extra, changes.findings = (
            ExtraState(self.catalog, extra) if extra else None,
            findings,
        )
        absent = {finding.target for finding in self._reported("plan.missing")}
        changes.kept |= absent - {*self.missing, *changed}
        if changed:
            changes.recipes = self.trace.finish()
        unexpected = self._unexpected()
        if changes.dropped or {key for _, key in unexpected} != self._reported_unexpected():
            changes.unexpected = unexpected
        elif not (changed or changes.kept or extra or findings):
            return None
        return changes

    def _add_recipes(self, changes: HookChanges) -> set[str]:
        """Add a recipe for each tensor that is not copied unchanged; return their names."""
        changed: dict[str, torch.Tensor] = {}
        plain: dict[str, Symbol] = {}
        groups = self._groups()
        for name in self.copied.keys() - groups.keys():
            raise new_error(
                LOAD_HOOK, "the code writes to a tensor that is not in the state dict", tensor=name
            )
        for name, names in groups.items():
            if name.startswith(self.filled_prefixes):
                continue
            symbols = [self.symbols.state[key] for key in names if key in self.symbols.state]
            copies = self.copied.get(name, [])
            if symbols and copies and _is_same(copies[-1], symbols[0]):
                plain[name] = symbols[0]
                continue
            if copies and self._needs_recipe(name, copies[-1]):
                changed[name] = copies[-1]
            elif copies:  # the value comes from the model, even if the checkpoint has one
                changes.kept |= {name}
            for symbol in symbols:
                changes.dropped += self.symbols.sources_of(symbol)
        changed |= self._shared_sources(changed.values(), plain)
        for name, value in changed.items():
            self.trace.add(name, value)
        return set(changed)

    def _shared_sources(
        self, values: Iterable[torch.Tensor], plain: Mapping[str, Symbol]
    ) -> dict[str, Symbol]:
        """Return unchanged tensors whose sources a recipe reads, so that no rule matches them."""
        read = set(sources_of(symbols_in(list(values))))
        shared = {}
        for name, symbol in plain.items():
            if read.isdisjoint(self.symbols.sources_of(symbol)):
                continue
            if isinstance(symbol, WholeSymbol):
                message = "the code uses one of the several tensors from which this one is made"
                raise new_error(LOAD_HOOK, message, tensor=name)
            shared[name] = symbol
        return shared

    def _groups(self) -> dict[str, list[str]]:
        """Return the roots of tensors in the state dict, each with all its tied names."""
        groups: dict[str, list[str]] = {}
        for name, target in self.targets.items():
            if target.kind in SAVED:
                groups.setdefault(target.tie_of or name, []).append(name)
        return groups

    def _needs_recipe(self, name: str, value: torch.Tensor) -> bool:
        """Return whether the value differs from the tensor's own; reject it if it has no recipe."""
        if isinstance(value, OwnSymbol):
            if value.slot.name == name:
                return False
            raise new_error(
                LOAD_HOOK,
                f"the code assigns the model's own value of '{value.slot.name}'",
                tensor=name,
            )
        if isinstance(value, WholeSymbol) or value.is_meta:
            message = f"the code assigns {value!r}, which is not a tensor of the checkpoint"
            raise new_error(LOAD_HOOK, message, tensor=name)
        return True

    def _extra_state(self, missing: Any) -> tuple[dict[str, str], list[_core.Finding]]:
        """Return the sources of extra state by module, and findings for modules without one."""
        extra: dict[str, str] = {}
        findings = []
        for path, module in named_modules(self.model):
            if not is_own(module, "set_extra_state") or is_filled(module):
                continue
            name = f"{path}._extra_state".lstrip(".")
            state = self.extra.get(path)
            source = self.symbols.whole_source(state) if isinstance(state, Symbol) else None
            problem = ""
            if name in self.symbols.objects:
                problem = "cannot be loaded, because it is not a tensor in the checkpoint"
            elif source is not None:
                extra[path] = source
            elif state is not None:
                problem = "cannot be loaded, because a hook makes it from tensors of the checkpoint"
            elif name in self.missing and policies_of([name], missing, {})[name] == "error":
                problem = "is not in the checkpoint"
            if problem:
                owner = f"the extra state of '{path}' ({type(module).__name__}.set_extra_state)"
                hint = "load this model with load_state_dict"
                message, code = f"{owner} {problem}", "plan.extra_state"
                findings.append(_core.Finding("error", code, name, [], message, hint))
        return extra, findings

    def _reported_unexpected(self) -> set[str]:
        return {key for finding in self._reported("plan.unexpected") for key in finding.sources}

    def _reported(self, code: str) -> Iterator[_core.Finding]:
        return (finding for finding in self.core.findings if finding.code == code)

    def _unexpected(self) -> list[tuple[str, str]]:
        """Return unexpected names, without components of quantized tensors."""
        reported = self._reported_unexpected()
        unexpected = []
        for name in dict.fromkeys(self.unexpected):
            symbol = self.symbols.state.get(name)
            sources = self.symbols.sources_of(symbol) if symbol is not None else [name]
            if symbol is None or not reported.isdisjoint(sources):
                unexpected.append((name, sources[0]))
        return unexpected


def _attributes(module: _Module) -> dict[str, Any]:
    attributes: dict[str, Any] = {name: id(value) for name, value in vars(module).items()}
    for registry in _REGISTRIES:
        attributes[registry] = [
            (name, id(value), *_form(value)) for name, value in getattr(module, registry).items()
        ]
    return attributes


def _form(value: Any) -> tuple[Any, ...]:
    is_tensor = isinstance(value, torch.Tensor) and not is_lazy(value)
    return (value.shape, value.requires_grad) if is_tensor else ()


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not (isinstance(one, Symbol) and isinstance(other, Symbol)):
        return False
    return one.value == other.value if one.value >= 0 else one is other
