"""Defines small models whose weights bitsandbytes quantizes, and functions that inspect them."""

from __future__ import annotations

import bitsandbytes as bnb
import torch

from loadstone._model.walk import walk

FOUR_BIT = ("nf4", "nf4+double", "fp4")
KINDS = (*FOUR_BIT, "int8")


def linear(kind: str, inputs: int, outputs: int, **options: object) -> torch.nn.Module:
    """Return a layer of bitsandbytes that is not yet quantized."""
    if kind == "int8":
        return bnb.nn.Linear8bitLt(inputs, outputs, has_fp16_weights=False)
    options.setdefault("compress_statistics", kind == "nf4+double")
    return bnb.nn.Linear4bit(inputs, outputs, quant_type=kind.partition("+")[0], **options)


class Net(torch.nn.Module):
    """Two quantized layers whose rows are whole blocks, which bitsandbytes decodes correctly.

    Args:
        plain: decode weights in the forward pass even on a CPU with AVX512-BF16, as other CPUs do.
    """

    def __init__(self, kind: str, seed: int = 0, plain: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = torch.nn.Sequential(
            linear(kind, 128, 128), torch.nn.ReLU(), linear(kind, 128, 64)
        )
        self.eval().requires_grad_(False)
        if plain:
            for layer in self.quantized():
                layer.support_avx512bf16_for_cpu = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def quantized(self) -> list[torch.nn.Module]:
        return [self.body[0], self.body[2]]


def net(kind: str, seed: int = 0, plain: bool = False) -> Net:
    """Return a quantized model on the CPU."""
    return Net(kind, seed, plain).to("cpu")


def inputs(rows: int = 3, width: int = 128) -> torch.Tensor:
    """Return random values that are the same in each call."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def on_meta(model: torch.nn.Module) -> list[str]:
    """Return the names of all tensors on meta, including those in attributes."""
    return [slot.name for slot in walk(model) if slot.tensor.is_meta]


def copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state dict that shares no memory with the model."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def same_bytes(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Return true if both state dicts have the same names, order, dtypes, shapes and bytes."""
    return list(left) == list(right) and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and torch.equal(_bytes(left[name]), _bytes(right[name]))
        for name in left
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def decoding_keeps_nan(dtype: torch.dtype) -> bool:
    """Return true if bitsandbytes decodes NaN in a partial block; some CPUs lose it in bfloat16."""
    tensor = torch.full((2, 96), torch.nan, dtype=dtype)
    data, state = bnb.functional.quantize_4bit(tensor, blocksize=4096)
    return bool(bnb.functional.dequantize_4bit(data, state).isnan().all())
