"""Make only one model's conversions from the library's registry.

The library makes the transforms of all models at once and compiles a thousand patterns, which takes
longer than the rest of a small model's load. This module runs the library's function with
placeholders, which become transforms on demand. The library's own registry stays empty.
"""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

from transformers import conversion_mapping as library
from transformers.core_model_loading import WeightTransform

from loadstone._adapters.patch import Hook, Hooks, hooked, wrap_if_active
from loadstone._adapters.transformers.kernels import rebind_globals


@functools.cache
def hooks() -> Hooks:
    mapping = wrap_if_active("transformers", _mapping_of_type)
    return Hooks([Hook(library, "get_checkpoint_conversion_mapping", mapping)], "transformers")


def conversions_of(model: Any, key_mapping: Any, quantizer: Any) -> Any:
    with hooked(hooks()):
        return library.get_model_conversion_mapping(model, key_mapping, quantizer)


def _mapping_of_type(original: Any, model_type: Any) -> Any:
    # Releases without these names use their own, slower function.
    build = vars(library).get("_build_checkpoint_conversion_mapping")
    library_cache = vars(library).get("_checkpoint_conversion_mapping_cache", build)
    if library_cache is not None or not isinstance(build, types.FunctionType):
        return original(model_type)
    return copy.deepcopy(_placeholders(build).get(model_type))


@functools.cache
def _placeholders(build: types.FunctionType) -> Any:
    """Return the library's mapping of all model types, with placeholders for transforms."""
    classes = {
        name: functools.partial(_Placeholder, cls)
        for name, cls in build.__globals__.items()
        if isinstance(cls, type) and issubclass(cls, WeightTransform)
    }
    return rebind_globals(build, **classes)()


class _Placeholder:
    """A placeholder for a transform; copying it makes the transform."""

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        self._call = cls, args, kwargs

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        cls, args, kwargs = copy.deepcopy(self._call, memo)
        return cls(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return the transform's attribute, for code that reads patterns of other transforms."""
        return getattr(copy.deepcopy(self), name)
