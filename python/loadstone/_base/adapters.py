"""Adapters of libraries.

They register references (``module:name``), which are resolved on demand, so that registering an
adapter imports no library.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Adapter:
    """The hooks through which an adapter takes part in loads.

    Attributes:
        rules: a reference to ``(model_type, config) -> rules`` for a model type's conversions.
        skeleton_builder: a reference to ``(model) -> function`` that builds such a model.
        gguf: a reference to ``(source, target, **options)``, which returns recipes and metadata of
            a GGUF file, or None.
        recipes: a reference to ``(model, catalog, dtype=) -> AdapterRecipes``.
        extend: a reference to ``(recipes, model, catalog, dtype, quantize)``, which adds a
            :class:`TargetExtension` if a plan needs one.
        quantizer: a reference to the module that quantizes weights for model adapters.
        is_supported: a reference to ``(library) -> bool`` for the installed release.
        components: a reference to ``(tensor) -> {name: tensor}``: scales of a quantized one ...
        not_held: a reference to ``(model, slots) -> {name: reason}``: values stored elsewhere.
        tensor_classes: names of classes whose memory it fills.
        filled_modules: modules of layers that it fills; it does the work of their load hooks.
        gguf_rank_max: maximal rank of tensors in GGUF files for the library's models.
    """

    library: str
    recipes: str = ""
    rules: str = ""
    skeleton_builder: str = ""
    gguf: str = ""
    extend: str = ""
    quantizer: str = ""
    is_supported: str = ""
    components: str = ""
    not_held: str = ""
    tensor_classes: tuple[str, ...] = ()
    filled_modules: tuple[str, ...] = ()
    gguf_rank_max: int | None = None


ADAPTERS: dict[str, Adapter] = {}  # by library, in order of registration


def register(*adapters: Adapter) -> None:
    ADAPTERS.update({each.library: each for each in adapters})


def adapters_with(part: str) -> dict[str, Adapter]:
    return {library: each for library, each in ADAPTERS.items() if getattr(each, part)}


def resolve(reference: str) -> Any:
    """Import the referenced object, or the module if the reference names no object."""
    module, _, name = reference.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def is_of(cls: type, package: str) -> bool:
    """Return whether a class or one of its bases comes from a package."""
    return any(f"{base.__module__}.".startswith(f"{package}.") for base in cls.__mro__)


def has_modules_of(model: Any, package: str) -> bool:
    return any(is_of(each, package) for each in {type(module) for module in model.modules()})
