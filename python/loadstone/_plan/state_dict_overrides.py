"""Code of a model that ``load_state_dict`` runs: hooks and overrides."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from loadstone import _core
from loadstone._base.adapters import ADAPTERS

_Module = torch.nn.Module
_METHODS = ("_load_from_state_dict", "set_extra_state")
# The hooks of these modules only gather or scatter sharded tensors, restore names that state dicts
# lack, or note writes.
_IGNORED = (
    "torch.distributed.fsdp.",
    "torch.distributed.algorithms._checkpoint.",
    "loadstone._model.half_written",
)
LOAD_HOOK = "plan.load_hook"
_HINT = "write rules for the names, convert the checkpoint, or load it with load_state_dict"


def is_own(module: _Module, method: str) -> bool:
    return method in vars(module) or getattr(type(module), method) is not getattr(_Module, method)


def is_overridden(model: _Module) -> bool:
    return is_own(model, "load_state_dict")


def has_code(model: _Module, core: _core.Plan | None = None) -> bool:
    """Return whether ``load_state_dict`` would run code of the model.

    Code of torch's batch norms only adds the counter that old checkpoints lack. That code counts
    only if ``core``, a plan made without it, reports a missing counter.
    """
    counts = any(
        finding.code == "plan.missing" and finding.target.endswith("num_batches_tracked")
        for finding in (core.findings if core else ())
    )
    modules = (module for module in model.modules() if counts or not _is_batch_norm(module))
    return is_overridden(model) or any(_has_code(module) for module in modules)


def _is_batch_norm(module: _Module) -> bool:
    plain = type(module)._load_from_state_dict is _NormBase._load_from_state_dict
    has_own_code = vars(module).keys() & set(_METHODS) or is_own(module, "set_extra_state")
    return plain and not _hooks(module) and not has_own_code


def _has_code(module: _Module) -> bool:
    has_own_code = bool(_hooks(module)) or any(is_own(module, method) for method in _METHODS)
    return has_own_code and not is_filled(module)


def is_filled(module: _Module) -> bool:
    """Return whether an adapter fills the layer, which replaces the layer's own load code."""
    name = type(module).__module__
    return any(name in adapter.filled_modules for adapter in ADAPTERS.values())


def refusal(path: str, module: _Module, reason: str) -> _core.Finding:
    names = [_hook_name(hook) for hook in _hooks(module)]
    names += [
        f"{type(module).__qualname__}.{method}"
        for method in ("_load_from_state_dict", "load_state_dict")
        if is_own(module, method)
    ]
    code = f" ({', '.join(names)})" if names else ""
    message = f"'{path}' has code that load_state_dict runs{code}: {reason}"
    return _core.Finding("error", LOAD_HOOK, path, [], message, _HINT)


def _hooks(module: _Module) -> list[Any]:
    """Return the hooks that change a load."""
    hooks = [*module._load_state_dict_pre_hooks.values()]
    hooks += module._load_state_dict_post_hooks.values()
    return [hook for hook in hooks if not _module_of(hook).startswith(_IGNORED)]


def _hook_name(hook: Any) -> str:
    function = _function(hook)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _module_of(hook: Any) -> str:
    return str(getattr(_function(hook), "__module__", ""))


def _function(hook: Any) -> Any:
    function = getattr(hook, "hook", hook)
    return getattr(function, "func", function)
