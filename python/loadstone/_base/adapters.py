"""The registry of library adapters, which connect loadstone to other libraries.

Adapters register references (``module:name``), which loadstone resolves on demand, so that
registering an adapter imports no library. (LoRA adapters of models are in
``loadstone._files.lora``.)
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LibraryAdapter:
    """Describes how loadstone integrates one library. Functions are strings ``module:name``.

    Attributes:
        library: the library's package; ``loadstone.LIBRARY`` is the adapter's public module.
        is_patchable: the public module has ``patches()``, which returns hooks for
            :func:`loadstone.patch`; ``_adapters/sites`` has the library's table of functions, and
            ``_adapters/LIBRARY/canary.py`` its tiny loads.
        no_canary: the reason why ``doctor`` runs no tiny load of a library that is not patchable.
        recipes: a reference to ``(model, catalog, dtype=) -> LibraryRecipes``.
        rules: a reference to ``(model_type, config) -> rules`` for a model type's conversions.
        check: a reference to ``(path) -> EngineCheck``, the verdict of ``loadstone.check``.
        skeleton_builder: a reference to ``(model) -> function`` that builds a model of that class.
        gguf: a reference to ``(source, target, **options)``, which returns recipes and metadata of
            a GGUF file, or None.
        extend: a reference to ``(recipes, model, catalog, dtype, quantize)``, which adds a
            :class:`TargetExtension` if a plan needs one.
        quantized_layers: a reference to a module about the library's layers in models of other
            libraries: ``is_quantizing(module)``, ``quantized_bytes(model, name)``, and
            ``traced_weights()``, which returns an extension for these layers.
        is_supported: a reference to ``(library) -> bool`` for the installed release.
        components: a reference to ``(tensor) -> {name: tensor}``, which returns the components of a
            quantized tensor other than its data.
        not_held: a reference to ``(model, slots) -> {name: reason}``, which returns the tensors
            whose values are stored outside the model.
        offloaded: a reference to ``(model) -> {name: tensor}``, which returns the values that hooks
            store for tensors on meta, or None for a value on disk.
        uninitialized: a reference to ``(model) -> {id: reason}``, which returns the tensors of the
            model whose memory the library does not fill outside a forward pass, and why.
        tensor_classes: names of tensor classes whose memory the adapter fills.
        filled_modules: Python modules of layers that the adapter fills; it also does the work of
            their load hooks.
        skipped_attributes: attributes of modules in which the library's hooks store tensors, such
            as copies of the module's own tensors and cached outputs.
        wrapper_attributes: attributes in which the library's layers hold the module that they
            replaced.
        tie_list: the attribute in which models list ties as ``{name: root}``.
        tie_option: the field of models' configs that declares ties.
    """

    library: str
    is_patchable: bool = False
    no_canary: str = ""
    recipes: str = ""
    rules: str = ""
    check: str = ""
    skeleton_builder: str = ""
    gguf: str = ""
    extend: str = ""
    quantized_layers: str = ""
    is_supported: str = ""
    components: str = ""
    not_held: str = ""
    offloaded: str = ""
    uninitialized: str = ""
    tensor_classes: tuple[str, ...] = ()
    filled_modules: tuple[str, ...] = ()
    skipped_attributes: tuple[str, ...] = ()
    wrapper_attributes: tuple[str, ...] = ()
    tie_list: str = ""
    tie_option: str = ""


ADAPTERS: dict[str, LibraryAdapter] = {}  # by library name, in order of registration


def register(*adapters: LibraryAdapter) -> None:
    ADAPTERS.update({adapter.library: adapter for adapter in adapters})


def adapters_with(part: str) -> dict[str, LibraryAdapter]:
    return {library: adapter for library, adapter in ADAPTERS.items() if getattr(adapter, part)}


def names_in(part: str) -> set[str]:
    """Return the union of the names that the adapters list in an attribute."""
    return {name for adapter in ADAPTERS.values() for name in getattr(adapter, part)}


def resolve(reference: str) -> Any:
    """Import the referenced object, or the module if the reference names no object."""
    path, _, name = reference.partition(":")
    module = importlib.import_module(path)
    return getattr(module, name) if name else module


def is_of(cls: type, package: str) -> bool:
    """Return whether a class or one of its bases comes from a package."""
    return any(f"{base.__module__}.".startswith(f"{package}.") for base in cls.__mro__)


def has_parts_of(model: Any, package: str) -> bool:
    """Return whether the class of any module, parameter or buffer of a model is from a package."""
    classes = set()
    for module in model.modules():
        classes.add(type(module))
        classes.update(map(type, module._parameters.values()), map(type, module._buffers.values()))
    return any(is_of(cls, package) for cls in classes)


def quantized_layers_of(model: Any) -> list[Any]:
    """Return the registered ``quantized_layers`` of each library that has layers in a model."""
    return [
        resolve(adapter.quantized_layers)
        for library, adapter in adapters_with("quantized_layers").items()
        if has_parts_of(model, library)
    ]
