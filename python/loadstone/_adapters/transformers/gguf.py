"""Maps tensors of a GGUF file to the names in published checkpoints of the model.

Names, permutations and arithmetic are transformers' own: its GGUF code runs on the given tensors
instead of arrays and files. It reads only the keys and values.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import core_model_loading, modeling_gguf_pytorch_utils

from loadstone._adapters.transformers.export import model_class
from loadstone._adapters.transformers.kernels import with_globals
from loadstone._base.errors import Error, make
from loadstone._files.catalog import inspect


def config_of(path: str) -> Any:
    """Return the configuration from a file's keys and values, or raise ``plan.conversion``."""
    file = Path(path)
    try:
        return transformers.AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
    except Exception as reason:  # the library may raise anything
        raise _failed(path, reason) from reason


def in_published_names(tensors: Mapping[str, torch.Tensor], path: str) -> dict[str, torch.Tensor]:
    """Rename a file's tensors as in a safetensors checkpoint of the model.

    ``tensors`` have decoded shapes and may be symbols. Raises ``plan.conversion``.
    """
    config = config_of(path)
    try:
        with torch.device("meta"):
            model = model_class(config)(config)
        made = _in_names_of_the_model(tensors, path, model)
        named: dict[str, torch.Tensor] = core_model_loading.revert_weight_conversion(model, made)
    except Error:
        raise
    except Exception as reason:
        raise _failed(path, reason) from reason
    return named


def _in_names_of_the_model(
    tensors: Mapping[str, torch.Tensor], path: str, model: Any
) -> dict[str, torch.Tensor]:
    library: Any = modeling_gguf_pytorch_utils
    values = library.load_gguf_checkpoint(path, return_tensors=False)["config"]
    architecture = str(inspect(path).metadata["general.architecture"])
    known = library.TENSOR_PROCESSORS.get(architecture, library.TensorProcessor)
    processor = _with_stand_ins(known)(config=values)
    names = library.get_gguf_hf_weights_map(model, processor)
    made: dict[str, Any] = {}
    for name, tensor in tensors.items():
        done = processor.process(
            weights=Array(tensor),
            name=name,
            tensor_key_mapping=names,
            parsed_parameters={"tensors": made},
        )
        if done.name in names:
            made[names[done.name]] = done.weights
    return {name: _tensor(value, name) for name, value in made.items()}


class Array:
    """Applies the array operations of the library's code to a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def T(self) -> Array:  # noqa: N802
        return Array(self.tensor.permute(*reversed(range(self.tensor.dim()))))

    def reshape(self, *shape: Any) -> Array:
        return Array(self.tensor.reshape(*shape))

    def swapaxes(self, first: int, second: int) -> Array:
        return Array(self.tensor.transpose(first, second))

    def flatten(self) -> Array:
        return Array(self.tensor.reshape(-1))

    def __getitem__(self, index: Any) -> Array:
        return Array(self.tensor[index])

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        given = [_tensors(each) for each in args]
        stand_in = _FUNCTIONS.get(func.__name__)
        if stand_in is None:
            return NotImplemented
        made = stand_in(*given, **kwargs)
        return [Array(each) for each in made] if isinstance(made, tuple | list) else Array(made)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if method != "__call__" or kwargs or not hasattr(torch, ufunc.__name__):
            return NotImplemented
        return Array(getattr(torch, ufunc.__name__)(*(_tensors(each) for each in args)))

    def __neg__(self) -> Array:
        return Array(-self.tensor)

    def __sub__(self, other: Any) -> Array:
        return Array(self.tensor - _tensors(other))

    def __add__(self, other: Any) -> Array:
        return Array(self.tensor + _tensors(other))


class Canvas:
    """A tensor of zeros that the library's code fills piece by piece along one dimension."""

    def __init__(self, shape: Any) -> None:
        self._shape = list(shape)
        self._dim = 0
        self._pieces: dict[int, torch.Tensor] = {}

    def narrow(self, dim: int, start: int, size: int) -> Any:
        self._dim = dim

        def copy(tensor: torch.Tensor) -> None:
            if tensor.shape[dim] == size:
                self._pieces[start] = tensor

        return types.SimpleNamespace(copy_=copy)

    def joined(self, name: str) -> torch.Tensor:
        """Join all pieces. Raises PlanError ``plan.conversion`` if one is missing."""
        pieces = [self._pieces[start] for start in sorted(self._pieces)]
        whole = torch.cat(pieces, self._dim)
        if list(whole.shape) != self._shape:
            message = "the file lacks a part of this tensor"
            raise make(
                "plan.conversion",
                message,
                tensor=name,
                found=str(list(whole.shape)),
                expected=str(self._shape),
            )
        return whole


def _tensor(value: Any, name: str) -> torch.Tensor:
    if isinstance(value, Canvas):
        return value.joined(name)
    return value.tensor if isinstance(value, Array) else value


def _tensors(value: Any) -> Any:
    if isinstance(value, Array):
        return value.tensor
    return [_tensors(each) for each in value] if isinstance(value, list | tuple) else value


_FUNCTIONS: dict[str, Any] = {
    "copy": lambda tensor: tensor,
    "expand_dims": lambda tensor, axis: tensor.unsqueeze(axis),
    "array_split": lambda tensor, count, axis=0: torch.tensor_split(tensor, count, axis),
    "stack": lambda tensors, axis=0: torch.stack(tensors, axis),
}

# Replaces ``torch`` in the library's code that makes tensors from arrays.
_TORCH = types.SimpleNamespace(
    Tensor=torch.Tensor,
    from_numpy=lambda array: array.tensor,
    tensor=lambda array, **_: array.tensor,
    zeros=lambda shape, **_: Canvas(shape),
)


def _with_stand_ins(known: Any) -> Any:
    """Return a processor of the library whose code uses these stand-ins instead of torch."""
    functions = {
        name: with_globals(each, torch=_TORCH)
        for owner in reversed(known.__mro__)
        for name, each in vars(owner).items()
        if isinstance(each, types.FunctionType) and name != "__init__"
    }
    return type(known.__name__, (known,), functions)


def _failed(path: str, reason: Exception) -> Error:
    told = f"{type(reason).__name__}: {' '.join(str(reason).split())}"
    message = f"transformers has no way from this GGUF file to the model ({told})"
    return make("plan.conversion", message, path=path)
