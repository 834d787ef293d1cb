"""Compares a loaded transformers model with transformers' own ``from_pretrained``.

``differences`` returns one line per difference, and ``assert_same_state`` raises with these lines.
Values are compared as bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import torch

from loadstone._model.walk import LOAD_RECORDER


@dataclasses.dataclass
class Loaded:
    """The result of a load by transformers.

    Attributes:
        info: transformers' loading information.
        uninitialised: names of tensors that have uninitialised memory.
    """

    model: Any
    info: dict[str, Any]
    uninitialised: set[str]

    @property
    def random(self) -> set[str]:
        """Names of tensors that an initialiser filled, because the file has no values for them."""
        return random_names(self.model, self.info)


@contextlib.contextmanager
def filled_memory() -> Iterator[None]:
    """Fill uninitialised memory from torch with NaN or the largest integer."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def library_load(cls: Any, folder: Any, **options: Any) -> Loaded:
    """Call ``cls.from_pretrained(folder, **options)`` with uninitialised memory made visible."""
    with filled_memory():
        model, info = cls.from_pretrained(folder, output_loading_info=True, **options)
    return Loaded(model, info, uninitialised_names(model))


def uninitialised_names(model: torch.nn.Module) -> set[str]:
    """Return names of tensors that contain the fill of ``filled_memory``; no test file does."""
    return {
        name for name, tensor in all_tensors(model).items() if not tensor.is_meta and _fill(tensor)
    }


def _fill(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor).any())
    if tensor.dtype == torch.bool or not tensor.numel():
        return False
    return bool((tensor == torch.iinfo(tensor.dtype).max).any())


def random_names(model: torch.nn.Module, info: dict[str, Any]) -> set[str]:
    """Return the missing and mismatched names, and the names tied to them."""
    names = set(info["missing_keys"]) | {item[0] for item in info["mismatched_keys"]}
    for group in tie_groups(model):
        if names & group:
            names |= group
    return names


def all_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name, with every name of a tie."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))


def tie_groups(model: torch.nn.Module) -> set[frozenset[str]]:
    """Return groups of names that share one memory."""
    places: dict[Any, set[str]] = {}
    for name, tensor in all_tensors(model).items():
        if tensor.is_meta:
            place: Any = id(tensor)
        elif tensor.numel():
            place = (tensor.device, tensor.data_ptr(), tensor.shape)
        else:
            continue
        places.setdefault(place, set()).add(name)
    return {frozenset(names) for names in places.values() if len(names) > 1}


def assert_same_state(*loaded: Any, **apart: Collection[str]) -> None:
    """Fail with one line per difference."""
    found = differences(*loaded, **apart)
    shown = found[:20] + ([f"... and {len(found) - 20} more"] if len(found) > 20 else [])
    assert not found, "\n".join(shown)


def differences(
    ours: Any,
    library: Any,
    ours_info: dict[str, Any] | None,
    library_info: dict[str, Any] | None,
    random_names: Collection[str] = (),
    uninitialised: Collection[str] = (),
) -> list[str]:
    """Return a line for each difference.

    Args:
        random_names: tensors that an initialiser filled; their values are compared only if
            transformers' value is constant (zeros, ones).
        uninitialised: tensors that transformers leaves uninitialised; ours must be finite.
    """
    return [
        *_tensors(ours, library, set(random_names), set(uninitialised)),
        *_ties(ours, library),
        *_info(ours_info, library_info),
        *_attributes(ours, library),
        *_modules(ours, library),
    ]


def _tensors(ours: Any, library: Any, random: set[str], uninitialised: set[str]) -> Iterator[str]:
    mine, theirs = all_tensors(ours), all_tensors(library)
    if list(mine) != list(theirs):
        missing, extra = sorted(theirs.keys() - mine.keys()), sorted(mine.keys() - theirs.keys())
        yield f"tensor names differ: not in ours {missing}, only in ours {extra}, or their order"
    persistent = set(ours.state_dict(keep_vars=True)) ^ set(library.state_dict(keep_vars=True))
    if persistent:
        yield f"names of the state dict differ: {sorted(persistent)}"
    for name in mine.keys() & theirs.keys():
        yield from _tensor(name, mine[name], theirs[name], name in random, name in uninitialised)


def _tensor(
    name: str, mine: torch.Tensor, theirs: torch.Tensor, random: bool, uninitialised: bool
) -> Iterator[str]:
    for what in ("shape", "dtype", "device", "requires_grad", "is_leaf"):
        if getattr(mine, what) != getattr(theirs, what):
            yield f"{name}: {what} {getattr(mine, what)}, library {getattr(theirs, what)}"
    if type(mine) is not type(theirs):
        yield f"{name}: class {type(mine).__name__}, library {type(theirs).__name__}"
    flags = [getattr(tensor, "_is_hf_initialized", None) for tensor in (mine, theirs)]
    if flags[0] != flags[1]:
        yield f"{name}: _is_hf_initialized {flags[0]}, library {flags[1]}"
    if mine.is_meta or theirs.is_meta or mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return
    if uninitialised:
        if _fill(mine) or not _finite(mine):
            yield f"{name}: not finite (the library leaves it unwritten)"
    elif random and not _constant(theirs):
        if not _finite(mine):
            yield f"{name}: not finite (drawn by an initialiser)"
        elif _constant(mine):
            yield f"{name}: the same number throughout, the library draws random ones"
    elif not same_bytes(mine, theirs):
        yield f"{name}: {_first_difference(mine, theirs)}"


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Compare dtypes, shapes and bytes."""
    kinds = (first.dtype, first.shape) == (second.dtype, second.shape)
    return kinds and same_bytes(first, second)


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return true if the bytes are equal, for equal shapes and dtypes."""
    return torch.equal(_bytes(first), _bytes(second))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _constant(tensor: torch.Tensor) -> bool:
    """Return true if all elements are equal; a single element must be an integer."""
    if tensor.numel() < 2:
        return not tensor.numel() or float(tensor.reshape(-1)[0]).is_integer()
    return bool((tensor == tensor.reshape(-1)[0]).all())


def _first_difference(mine: torch.Tensor, theirs: torch.Tensor) -> str:
    width = mine.element_size()
    unequal = (_bytes(mine) != _bytes(theirs)).reshape(-1, width).any(1).nonzero().flatten()
    at = int(unequal[0])
    values = [tensor.detach().reshape(-1)[at].item() for tensor in (mine, theirs)]
    return (
        f"{len(unequal)} of {mine.numel()} values differ, at {at}: {values[0]!r}, "
        f"library {values[1]!r}"
    )


def _ties(ours: Any, library: Any) -> Iterator[str]:
    mine, theirs = tie_groups(ours), tie_groups(library)
    for group in sorted(map(sorted, theirs - mine)):
        yield f"tied in the library only: {group}"
    for group in sorted(map(sorted, mine - theirs)):
        yield f"tied in ours only: {group}"


def _info(ours: dict[str, Any] | None, library: dict[str, Any] | None) -> Iterator[str]:
    if ours is None or library is None:
        if ours is not library:
            yield "loading information is there in one only"
        return
    if ours.keys() != library.keys():
        yield f"loading information: keys {sorted(ours)}, library {sorted(library)}"
    for name in ours.keys() & library.keys():
        if type(ours[name]) is not type(library[name]):
            yield f"{name}: a {type(ours[name]).__name__}, library {type(library[name]).__name__}"
        if ours[name] != library[name]:
            mine, theirs = set(map(_plain, ours[name])), set(map(_plain, library[name]))
            yield (
                f"{name}: only in ours {sorted(mine - theirs, key=str)}, "
                f"only in the library's {sorted(theirs - mine, key=str)}"
            )


def _plain(value: Any) -> Any:
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value


ABSENT = "(absent)"


def _attributes(ours: Any, library: Any) -> Iterator[str]:
    for what, read in _READERS.items():
        mine, theirs = read(ours), read(library)
        if mine != theirs:
            yield f"{what}: {_shorten(mine, theirs)}"
    # loadstone records a load at the model, for its deep copies.
    extra = (vars(ours).keys() ^ vars(library).keys()) - {LOAD_RECORDER}
    if extra:
        yield f"attributes of the model that one of both lacks: {sorted(extra)}"


def _shorten(mine: Any, theirs: Any) -> str:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        names = sorted(
            name
            for name in mine.keys() | theirs.keys()
            if mine.get(name, ABSENT) != theirs.get(name, ABSENT)
        )
        mine = {name: mine.get(name, ABSENT) for name in names}
        theirs = {name: theirs.get(name, ABSENT) for name in names}
    return f"{mine!r}, library {theirs!r}"


def conversions(model: Any) -> Any:
    """Return ``_weight_conversions`` as plain data."""
    found = getattr(model, "_weight_conversions", ABSENT)
    if found is ABSENT or found is None:
        return found
    return [
        (type(item).__name__, list(item.source_patterns), list(item.target_patterns))
        for item in found
    ]


def _generation(model: Any) -> Any:
    found = getattr(model, "generation_config", ABSENT)
    return found.to_dict() if hasattr(found, "to_dict") else found


_READERS = {
    "class": type,
    "training": lambda model: model.training,
    "config": lambda model: model.config.to_dict(),
    "class of the config": lambda model: type(model.config),
    "config.dtype": lambda model: model.config.dtype,
    "dtype": lambda model: model.dtype,
    "attention": lambda model: getattr(model.config, "_attn_implementation", ABSENT),
    "name_or_path": lambda model: getattr(model, "name_or_path", ABSENT),
    "generation_config": _generation,
    "_weight_conversions": conversions,
    "hf_quantizer": lambda model: type(getattr(model, "hf_quantizer", ABSENT)),
    "hf_device_map": lambda model: getattr(model, "hf_device_map", ABSENT),
    "tied weights": lambda model: getattr(model, "all_tied_weights_keys", ABSENT),
}


def _modules(ours: Any, library: Any) -> Iterator[str]:
    mine, theirs = dict(ours.named_modules()), dict(library.named_modules())
    if list(mine) != list(theirs):
        yield f"modules differ: {sorted(mine.keys() ^ theirs.keys())}, or their order"
    for name in mine.keys() & theirs.keys():
        for what, read in _MODULE_READERS.items():
            values = read(mine[name]), read(theirs[name])
            if values[0] != values[1]:
                shown = name or "(the model)"
                yield f"{shown}: {what} {values[0]!r}, library {values[1]!r}"


def _hook(module: Any) -> Any:
    """Return the class of accelerate's hook, its inner hooks, and its execution device."""
    hook = getattr(module, "_hf_hook", None)
    inner = [type(item).__name__ for item in getattr(hook, "hooks", ())]
    places = getattr(hook, "execution_device", None), getattr(hook, "offload", None)
    return type(hook).__name__, inner, places


def _hook_counts(module: Any) -> dict[str, int]:
    return {
        name: len(value)
        for name, value in vars(module).items()
        if name.endswith("_hooks") and isinstance(value, dict) and value
    }


def _class(module: Any) -> str:
    """Return the class by name, because torch makes a class per parametrised module."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


_MODULE_READERS = {
    "class": _class,
    "training": lambda module: module.training,
    "_is_hf_initialized": lambda module: getattr(module, "_is_hf_initialized", None),
    "_hf_hook": _hook,
    "torch hooks": _hook_counts,
}
