"""Writes tiny checkpoints that bitsandbytes quantizes, and compares quantized models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig
from transformers_models import by_name, write_checkpoint

from loadstone._model.walk import LOAD_RECORDER, walk

KINDS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4 nested": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.bfloat16,
    },
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "fp4 in bfloat16": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "fp4",
        "bnb_4bit_quant_storage": torch.bfloat16,
    },
    "int8": {"load_in_8bit": True, "llm_int8_threshold": 5.0},
}
MODELS = ["llama", "gpt2", "mixtral", "qwen3_moe", "t5", "qwen2_5_vl"]


def config(kind: str, **changes: Any) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(**KINDS[kind] | changes)


def plain(
    name: str, folder: Path, dtype: torch.dtype = torch.bfloat16, shard: int | None = None
) -> Path:
    return write_checkpoint(by_name(name), folder, "public", dtype, shard)


def quantized(name: str, kind: str, folder: Path, shard: int | str = "50GB") -> Path:
    """Write a checkpoint that transformers quantized with bitsandbytes and saved."""
    source = plain(name, folder / "plain")
    model = by_name(name).cls.from_pretrained(source, quantization_config=config(kind))
    target = folder / "quantized"
    model.save_pretrained(target, max_shard_size=shard)
    return target


def change(folder: Path, edit: Any) -> None:
    """Change the tensors of a checkpoint that has one file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def differences(ours: torch.nn.Module, theirs: torch.nn.Module) -> Iterator[str]:
    """Yield a line for each difference in the bytes of tensors or the attributes of parameters."""
    mine = {slot.name: slot.tensor for slot in walk(ours)}
    others = {slot.name: slot.tensor for slot in walk(theirs)}
    if list(mine) != list(others):
        yield f"tensors of one model alone: {sorted(mine.keys() ^ others.keys())}"
    for name in mine.keys() & others.keys():
        first, second = mine[name], others[name]
        if type(first) is not type(second):
            yield f"{name}: {type(first)}, library {type(second)}"
        for what in ("dtype", "shape", "device", "requires_grad"):
            if getattr(first, what) != getattr(second, what):
                yield f"{name}: {what} {getattr(first, what)}, library {getattr(second, what)}"
        if first.nbytes != second.nbytes or not torch.equal(raw(first), raw(second)):
            yield f"{name}: other bytes"
    modules = zip(ours.named_modules(), theirs.named_modules(), strict=True)
    for (path, first), (_, second) in modules:
        extra = (vars(first).keys() ^ vars(second).keys()) - {LOAD_RECORDER}
        if type(first) is not type(second) or extra:
            yield f"{path}: {type(first)}, {extra}"
        for name, parameter in first._parameters.items():
            yield from _attributes(f"{path}.{name}", parameter, second._parameters[name])


def _attributes(name: str, first: Any, second: Any) -> Iterator[str]:
    if first is None or second is None:
        return
    mine, others = vars(first), vars(second)
    if mine.keys() != others.keys():
        yield f"{name}: attributes {mine.keys() ^ others.keys()}"
    for key in mine.keys() & others.keys():
        one, other = mine[key], others[key]
        if isinstance(one, torch.nn.Module):
            if one._parameters.get("weight") is not first:
                yield f"{name}.{key}: another module"
        elif type(one).__name__ == "QuantState":
            yield from _attributes(f"{name}.{key}", one, other)
        elif not isinstance(one, torch.Tensor) and one != other:
            yield f"{name}.{key}: {one!r}, library {other!r}"


def raw(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().as_subclass(torch.Tensor).cpu()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def assert_same(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    found = list(differences(ours, theirs))
    assert not found, "\n".join(found[:20])
