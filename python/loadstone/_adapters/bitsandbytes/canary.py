"""Canaries of bitsandbytes: weights quantized by a load, and by bitsandbytes' own parameter."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit

from loadstone._adapters.canaries import Canary
from loadstone._execute.load import load
from loadstone._skeleton.skeleton import skeleton

_ROWS, _COLUMNS = 32, 64


def canaries(folder: Path) -> Iterator[Canary]:
    torch.manual_seed(0)
    state = _model().state_dict()
    torch.save(state, folder / "model.bin")

    def library_model(encoding: str) -> Any:
        layer: Any
        if encoding == "int8":
            layer = Linear8bitLt(_COLUMNS, _ROWS, bias=False, has_fp16_weights=False, threshold=6.0)
            layer.weight = Int8Params(state["0.weight"], requires_grad=False).to("cpu")
        else:
            options: Any = {"quant_type": encoding, "compress_statistics": False}
            layer = Linear4bit(_COLUMNS, _ROWS, bias=False, **options)
            layer.weight = Params4bit(state["0.weight"], module=layer, **options).to("cpu")
        return torch.nn.Sequential(layer)

    def loaded_model(encoding: str) -> Any:
        with skeleton():
            model = _model()
        load(model, folder / "model.bin", quantize=encoding)
        return model

    note = "the library has no loader, so its own parameter quantizes"
    for name in ("nf4", "fp4", "int8"):
        reference = functools.partial(library_model, name)
        yield Canary(reference, functools.partial(loaded_model, name), note=note, name=name)


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(_COLUMNS, _ROWS, bias=False, dtype=torch.bfloat16))
