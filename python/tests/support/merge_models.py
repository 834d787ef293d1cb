"""Writes small models and adapters for merges, and computes expected merges with torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

EPSILON = 2.0**-24  # one rounding of F32
HIDDEN, INNER, LAYERS = 72, 104, 2
PROJECTIONS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}


def model(seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Return the tensors of a model with two layers, a norm and an integer buffer."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {"model.norm.weight": torch.randn(HIDDEN, generator=generator).to(dtype)}
    for layer in range(LAYERS):
        for name, shape in PROJECTIONS.items():
            weight = torch.randn(shape, generator=generator).to(dtype)
            tensors[f"model.layers.{layer}.{name}.weight"] = weight
    tensors["positions"] = torch.arange(11)
    return tensors


def products(
    rank: int, seed: int, names: Mapping[str, tuple[int, int]], dtype: torch.dtype = torch.float32
) -> Tensors:
    """Return ``lora_A`` and ``lora_B`` of each module, by name."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, columns) in names.items():
        tensors[f"{name}.lora_A"] = torch.randn(rank, columns, generator=generator).to(dtype)
        tensors[f"{name}.lora_B"] = torch.randn(rows, rank, generator=generator).to(dtype)
    return tensors


def modules() -> dict[str, tuple[int, int]]:
    """Return the shapes of the modules of :func:`model` that have adapters."""
    return {
        f"model.layers.{layer}.{name}": shape
        for layer in range(LAYERS)
        for name, shape in PROJECTIONS.items()
    }


def write_peft(folder: Path, tensors: Tensors, **config: Any) -> Path:
    """Write an adapter in peft's form; the keys of ``tensors`` end in ``lora_A`` or ``lora_B``."""
    folder.mkdir(parents=True)
    named = {
        f"base_model.model.{name}{'.weight' if name.endswith(('_A', '_B')) else ''}": tensor
        for name, tensor in tensors.items()
    }
    save_file(named, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def added(weight: torch.Tensor, right: torch.Tensor, left: torch.Tensor, factor: float) -> Any:
    """Return ``weight + factor * (left @ right)`` in F32, summed in the documented order."""
    left, right = left.float(), right.float()
    product = left[:, :1] * right[:1]
    for k in range(1, right.shape[0]):
        product = product + left[:, k : k + 1] * right[k : k + 1]
    return weight.float() + torch.tensor(factor, dtype=torch.float32) * product


def with_products(base: Tensors, adapter: Tensors, factor: float) -> Tensors:
    """Add an adapter's products to a base, in F32."""
    merged = dict(base)
    for name in base:
        module = name.removesuffix(".weight")
        if f"{module}.lora_A" in adapter:
            right, left = adapter[f"{module}.lora_A"], adapter[f"{module}.lora_B"]
            merged[name] = added(base[name], right, left, factor)
    return merged


def same_bits(found: Tensors | Path, expected: Tensors) -> None:
    """Compare names, shapes, dtypes and bytes."""
    tensors = load_file(found) if isinstance(found, Path) else found
    assert sorted(tensors) == sorted(expected)
    for name, tensor in expected.items():
        assert tensors[name].dtype is tensor.dtype, name
        assert tensors[name].shape == tensor.shape, name
        as_bytes = [
            each.contiguous().view(-1).view(torch.uint8) for each in (tensors[name], tensor)
        ]
        assert torch.equal(*as_bytes), name


def rounded(tensors: Tensors, like: Tensors) -> Tensors:
    return {name: tensor.to(like[name].dtype) for name, tensor in tensors.items()}


def randomised(wrapped: Any) -> None:
    """Fill the matrices that peft initialises to zero, because zeros would hide errors."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                is_magnitude = "magnitude" in name
                parameter.copy_(noise.abs() + 0.5 if is_magnitude else noise)


def close(found: torch.Tensor, expected: torch.Tensor, scale: float) -> None:
    """Check the difference against the rounding of two sums of terms as large as ``scale``."""
    bound = scale * EPSILON * expected.abs().max().clamp(min=1).item()
    assert (found.double() - expected.double()).abs().max().item() <= bound
