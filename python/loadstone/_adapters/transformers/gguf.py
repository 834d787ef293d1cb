"""Map tensors of a GGUF file to the names in published checkpoints of the model.

Names, permutations and arithmetic are transformers' own: its GGUF code runs on the given tensors
instead of arrays and files. From the file, this code reads only the keys and values.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from numpy.lib.mixins import NDArrayOperatorsMixin
from transformers import core_model_loading, modeling_gguf_pytorch_utils

from loadstone._adapters.transformers.kernels import rebind_globals
from loadstone._adapters.transformers.rule_export import model_class
from loadstone._base.errors import Error, new_error
from loadstone._files.catalog import open_catalog


def rename_as_published(tensors: Mapping[str, torch.Tensor], path: str) -> dict[str, torch.Tensor]:
    """Rename a file's tensors as in a safetensors checkpoint of the model.

    ``tensors`` have decoded shapes and may be symbols. Raises ``plan.conversion``.
    """
    file = Path(path)
    try:
        config = transformers.AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
        with torch.device("meta"):
            model = model_class(config)(config)
        state = _rename_for_model(tensors, path, model)
        published: dict[str, torch.Tensor]
        published = core_model_loading.revert_weight_conversion(model, state)
    except Error:
        raise
    except Exception as reason:  # the library may raise anything
        cause = f"{type(reason).__name__}: {' '.join(str(reason).split())}"
        message = f"transformers cannot convert this GGUF file for the model ({cause})"
        raise new_error("plan.conversion", message, path=path) from reason
    return published


def _rename_for_model(
    tensors: Mapping[str, torch.Tensor], path: str, model: Any
) -> dict[str, torch.Tensor]:
    library: Any = modeling_gguf_pytorch_utils
    config = library.load_gguf_checkpoint(path, return_tensors=False)["config"]
    architecture = str(open_catalog(path, allow_links=True).metadata["general.architecture"])
    processor_class = library.TENSOR_PROCESSORS.get(architecture, library.TensorProcessor)
    processor = _stand_in_class(processor_class)(config=config)
    names = library.get_gguf_hf_weights_map(model, processor)
    state: dict[str, Any] = {}
    for name, tensor in tensors.items():
        processed = processor.process(
            weights=Array(tensor),
            name=name,
            tensor_key_mapping=names,
            parsed_parameters={"tensors": state},
        )
        if processed.name in names:
            state[names[processed.name]] = processed.weights
    return {name: _to_tensor(value, name) for name, value in state.items()}


class Array(NDArrayOperatorsMixin):
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
        stand_in = _FUNCTIONS.get(func.__name__)
        if stand_in is None:
            return NotImplemented
        result = stand_in(*_unwrap(args), **kwargs)
        if isinstance(result, tuple | list):
            return [Array(tensor) for tensor in result]
        return Array(result)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if method != "__call__" or kwargs or not hasattr(torch, ufunc.__name__):
            return NotImplemented
        return Array(getattr(torch, ufunc.__name__)(*_unwrap(args)))


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
        tensor = torch.cat(pieces, self._dim)
        if list(tensor.shape) != self._shape:
            raise new_error(
                "plan.conversion",
                "the file lacks a part of this tensor",
                tensor=name,
                found=str(list(tensor.shape)),
                expected=str(self._shape),
            )
        return tensor


def _to_tensor(value: Any, name: str) -> torch.Tensor:
    if isinstance(value, Canvas):
        return value.joined(name)
    return value.tensor if isinstance(value, Array) else value


def _unwrap(value: Any) -> Any:
    if isinstance(value, Array):
        return value.tensor
    return [_unwrap(item) for item in value] if isinstance(value, list | tuple) else value


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


def _stand_in_class(processor_class: Any) -> Any:
    """Return a processor of the library whose code uses ``_TORCH`` instead of torch."""
    functions = {
        name: rebind_globals(member, torch=_TORCH)
        for owner in reversed(processor_class.__mro__)
        for name, member in vars(owner).items()
        if isinstance(member, types.FunctionType) and name != "__init__"
    }
    return type(processor_class.__name__, (processor_class,), functions)
