"""Builds models for given tensors, and compares tensors bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

import loadstone

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Model(torch.nn.Module):
    """A model with the given tensors; dots in a name separate modules.

    Args:
        integers_too: make every tensor a parameter; otherwise integers become buffers.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], integers_too: bool = False) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            path, _, leaf = name.rpartition(".")
            module: torch.nn.Module = self
            for part in path.split(".") if path else ():
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            value = torch.zeros(tensor.shape, dtype=tensor.dtype)
            if tensor.is_floating_point() or integers_too:
                module.register_parameter(leaf, torch.nn.Parameter(value, requires_grad=False))
            else:
                module.register_buffer(leaf, value)


def model_of(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None, on_meta: bool = True
) -> Model:
    """Return a model with uninitialised tensors of the same shapes.

    Args:
        dtype: the dtype of floats; None keeps each tensor's dtype.
        on_meta: return a skeleton, without memory.
    """
    shapes = {
        name: torch.empty(
            tensor.shape,
            dtype=dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype,
            device="meta",
        )
        for name, tensor in tensors.items()
    }
    if not on_meta:
        return Model(shapes)
    with loadstone.skeleton():
        return Model(shapes)


def components_of(tensors: Mapping[str, torch.Tensor]) -> Model:
    """Return a skeleton with a parameter for each stored tensor, including codes and scales."""
    with loadstone.skeleton():
        return Model({name: tensor.to("meta") for name, tensor in tensors.items()}, True)


def write_skeleton(tensors: Mapping[str, torch.Tensor], path: Path) -> Path:
    """Write a skeleton as JSON.

    Unlike in a module, one tensor's name may be a prefix of another's ("a" and "a.b").
    """
    targets = [
        {"name": name, "shape": list(tensor.shape), "dtype": DTYPES[tensor.dtype]}
        for name, tensor in tensors.items()
    ]
    path.write_text(json.dumps({"targets": targets}))
    return path


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Compare names, shapes, dtypes and bits; any NaN equals any NaN, as its bits vary by CPU."""
    assert set(found) == set(expected)
    for name, wanted in expected.items():
        tensor = found[name]
        assert (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape), name
        if torch.equal(_bits(tensor), _bits(wanted)):
            continue
        wrong = _bits(tensor) != _bits(wanted)
        if wanted.is_floating_point():
            wrong &= ~(tensor.float().isnan() & wanted.float().isnan()).reshape(-1)
        at = wrong.nonzero().flatten()
        values = tensor.reshape(-1)[at[:4]].tolist(), wanted.reshape(-1)[at[:4]].tolist()
        assert not len(at), f"{name}: {len(at)} numbers, as {values[0]} for {values[1]}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(BITS[tensor.element_size()])
