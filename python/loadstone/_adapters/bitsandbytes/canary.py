"""The canary of bitsandbytes: weights quantized by a load, and by the library's own parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit, Params4bit

from loadstone._adapters.canaries import Canary
from loadstone._execute.load import load
from loadstone._skeleton.skeleton import skeleton

_ROWS, _COLUMNS = 32, 64


def canary(folder: Path) -> Canary:
    """Save a layer, and quantize it to nf4."""
    torch.manual_seed(0)
    state = _model().state_dict()
    torch.save(state, folder / "model.bin")

    def own() -> Any:
        layer: Any = Linear4bit(
            _COLUMNS, _ROWS, bias=False, quant_type="nf4", compress_statistics=False
        )
        layer.weight = Params4bit(
            state["0.weight"], quant_type="nf4", compress_statistics=False, module=layer
        ).to("cpu")
        return torch.nn.Sequential(layer)

    def ours() -> Any:
        with skeleton():
            model = _model()
        load(model, folder / "model.bin", quantize="nf4")
        return model

    return Canary(own, ours, note="the library has no loader, so its own parameter quantizes")


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(_COLUMNS, _ROWS, bias=False, dtype=torch.bfloat16))
