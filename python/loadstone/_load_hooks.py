"""Code that ``load_state_dict`` would run, and a load does not: hooks, overrides, extra state.

No list says which hooks matter. They run on a stand-in of the model, with a state dict of tensors
without memory that has the checkpoint's names: a hook that leaves alone what the plan loads is not
needed, and one that renames, makes or drops such a tensor, or changes its module, is an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from loadstone import _core
from loadstone._dtypes import is_dtype, torch_dtype
from loadstone._skeleton_schema import storage_key

if TYPE_CHECKING:
    from loadstone._catalog import Catalog
    from loadstone._plan import PlannedTarget

_Module = torch.nn.Module
_REGISTRIES = ("_parameters", "_buffers", "_modules")
# Their layers are filled by an adapter, which does what these do.
_REPRODUCED = ("bitsandbytes.nn.modules",)
_CODE = "plan.load_hook"
_HINT = "write rules for the names or convert the checkpoint, or load it with load_state_dict"


def findings(
    model: _Module, catalog: Catalog, targets: Iterable[PlannedTarget], missing: Any
) -> list[_core.Finding]:
    """An error for each module whose own code would have to run."""
    found = []
    suspects = []
    for path, module in model.named_modules():
        if _is_own(module, "set_extra_state"):
            found += _extra_state(path, module, catalog, missing)
        if _runs_code(module) and type(module).__module__ not in _REPRODUCED:
            suspects.append(path)
    overrides = _is_own(model, "load_state_dict")
    if suspects or overrides:
        found += _rehearsed(model, catalog, list(targets), suspects, overrides)
    return found


def _is_own(module: _Module, method: str) -> bool:
    return getattr(type(module), method) is not getattr(_Module, method)


def _runs_code(module: _Module) -> bool:
    hooks = module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks
    return bool(hooks) or _is_own(module, "_load_from_state_dict")


def _extra_state(path: str, module: _Module, catalog: Catalog, missing: Any) -> list[_core.Finding]:
    """Extra state may be anything, and ``set_extra_state`` may do anything with it."""
    name = f"{path}._extra_state".lstrip(".")
    is_there = name in catalog.tensors
    if not is_there and missing != "error":
        return []
    message = (
        f"{type(module).__name__} at '{path}' takes extra state (set_extra_state), which the "
        f"checkpoint {'holds' if is_there else 'does not hold'} and which is not loaded"
    )
    sources = [name] if is_there else []
    hint = "load this model with load_state_dict"
    return [_core.Finding("error", "plan.extra_state", name, sources, message, hint)]


def _rehearsed(
    model: _Module,
    catalog: Catalog,
    targets: list[PlannedTarget],
    suspects: list[str],
    overrides: bool,
) -> list[_core.Finding]:
    from loadstone._stand_in import stand_in

    try:
        twin = stand_in(model)
    except Exception as error:
        reason = f"it cannot be copied to be examined ({type(error).__name__}: {error})"
        return [_finding(path, model.get_submodule(path), reason) for path in suspects]
    state = _state(catalog, targets)
    needed = {target.name for target in targets}
    found = []
    for path in suspects:
        module = twin.get_submodule(path)
        reason = _Rehearsal(model, module, path, state, needed).reason()
        if reason:
            found.append(_finding(path, model.get_submodule(path), reason))
    if overrides and not found:
        reason = _Rehearsal(model, twin, "", state, needed).reason_of_all()
        if reason:
            found.append(_finding("", model, reason))
    return found


def _finding(path: str, module: _Module, reason: str) -> _core.Finding:
    hooks = [*module._load_state_dict_pre_hooks.values()]
    hooks += module._load_state_dict_post_hooks.values()
    names = [_hook_name(hook) for hook in hooks]
    names += [
        f"{type(module).__qualname__}.{method}"
        for method in ("_load_from_state_dict", "load_state_dict")
        if _is_own(module, method)
    ]
    message = f"'{path}' has code that load_state_dict runs ({', '.join(names)}): {reason}"
    return _core.Finding("error", _CODE, path, [], message, _HINT)


def _hook_name(hook: Any) -> str:
    function = getattr(hook, "hook", hook)
    function = getattr(function, "func", function)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _state(catalog: Catalog, targets: list[PlannedTarget]) -> dict[str, torch.Tensor]:
    """What ``load_state_dict`` would be given, on meta: loaded targets, and what is left over."""
    state = {}
    used: set[str] = set()
    for target in targets:
        if target.origin == "checkpoint":
            state[target.name] = _blank(target.shape, target.dtype)
            used.update(target.sources)
    for name, info in catalog.tensors.items():
        if name not in used and name not in state:
            state[name] = _blank(tuple(info.shape), info.encoding)
    return state


def _blank(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    kind = torch_dtype(dtype) if is_dtype(dtype) else torch.uint8
    return torch.empty(shape, dtype=kind, device="meta")


class _Rehearsal:
    """The code of one module, run on its stand-in."""

    def __init__(
        self,
        model: _Module,
        module: _Module,
        path: str,
        state: dict[str, torch.Tensor],
        needed: set[str],
    ) -> None:
        self.model = model
        self.module = module
        self.prefix = f"{path}." if path else ""
        self.before = dict(state)
        self.state = dict(state)
        self.needed = needed

    def reason(self) -> str:
        """The effect of the module's code that a load lacks; ``""``: none."""

        def run() -> None:
            load: Any = self.module._load_from_state_dict
            load(self.state, self.prefix, {}, True, [], [], [])
            for hook in self.module._load_state_dict_post_hooks.values():
                hook(self.module, torch.nn.modules.module._IncompatibleKeys([], []))

        return self._run(run) or self._changes()

    def reason_of_all(self) -> str:
        """The same for ``load_state_dict`` itself."""
        return self._run(lambda: self.module.load_state_dict(self.state, strict=False))

    def _run(self, code: Any) -> str:
        from loadstone._stand_in import Writes, window

        own = self._own()
        allowed = {
            (storage_key(tensor), window(self.before[name]))
            for name, tensor in self._saved()
            if name in self.before
        }
        try:
            with Writes(self.model) as writes, torch.no_grad():
                code()
        except Exception as error:
            return f"it cannot be examined without values ({type(error).__name__}: {error})"
        mine = {storage_key(tensor) for _, tensor in self._saved()}
        for operation, written, read in writes.made:
            is_plain = operation == "copy_" and all((written, each) in allowed for each in read)
            if written in mine and not is_plain:
                return "it would load other values"
        return "" if self._own() == own else "it would change the module"

    def _saved(self) -> list[tuple[str, torch.Tensor]]:
        module = self.module
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
        return [(f"{self.prefix}{name}", tensor) for name, tensor in named]

    def _own(self) -> dict[str, Any]:
        own: dict[str, Any] = {name: id(value) for name, value in vars(self.module).items()}
        for registry in _REGISTRIES:
            own[registry] = [
                (name, id(value)) for name, value in getattr(self.module, registry).items()
            ]
        return own

    def _changes(self) -> str:
        """What became of the tensors that the plan loads, and of those that it misses."""
        given = {storage_key(tensor) for tensor in self.before.values()}
        for name in self.needed:
            old, new = self.before.get(name), self.state.get(name)
            if old is new or (old is not None and new is old):
                continue
            if old is not None:
                return f"it would {'drop' if new is None else 'change'} '{name}'"
            # what no checkpoint has (a counter of batches) is missing here, and said to be
            if new is not None and (new.is_meta or storage_key(new) in given):
                return f"it would make '{name}' of other tensors of the checkpoint"
        return ""
