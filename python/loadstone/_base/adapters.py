"""Adapters of libraries, and the parts that each has in lower layers and in other adapters.

They register references, ``module:name``, that are followed when a model or a call needs them: a
library is not imported because it may be there.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Adapter:
    """The parts of an adapter in loads that other layers carry out.

    Attributes:
        library: the package that it adapts.
        rules: a reference to ``(model_type, config) -> rules``: of a type's conversions.
        skeleton_builder: a reference to ``(model) -> function`` that builds such a model.
        gguf: a reference to ``(source, target, **options)``, the recipes and metadata of a GGUF
            file that it makes of the source, or None.
        recipes: a reference to ``(model, catalog, dtype=) -> AdapterRecipes``.
        extend: a reference to ``(recipes, model, catalog, dtype, quantize)``, which adds a
            :class:`TargetExtension` where a plan needs one.
        quantizer: a reference to the module by which adapters of models have weights quantized.
        is_supported: a reference to ``(library) -> bool``: whether the release at hand is.
        components: a reference to ``(tensor) -> {name: tensor}``: scales of a quantized one ...
        not_held: a reference to ``(model, slots) -> {name: reason}``: values that are elsewhere.
        tensor_classes: names of classes whose memory it fills.
        filled_modules: modules of layers that it fills; it does what their load hooks do.
        gguf_rank_max: the most dims of tensors in GGUF files for the library's models.
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


ADAPTERS: dict[str, Adapter] = {}  # by their library, in the order in which they register


def register(*adapters: Adapter) -> None:
    """Makes adapters known."""
    ADAPTERS.update({each.library: each for each in adapters})


def adapters_with(part: str) -> dict[str, Adapter]:
    """The adapters that have a part, by their library."""
    return {library: each for library, each in ADAPTERS.items() if getattr(each, part)}


def resolve(reference: str) -> Any:
    """The object that a reference means, or the module where it has no name."""
    module, _, name = reference.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def is_of(cls: type, package: str) -> bool:
    """Return whether a class derives from one of a package."""
    return any(f"{base.__module__}.".startswith(f"{package}.") for base in cls.__mro__)


def has_modules_of(model: Any, package: str) -> bool:
    """Return whether a class of a model's modules derives from one of a package."""
    return any(is_of(each, package) for each in {type(module) for module in model.modules()})
