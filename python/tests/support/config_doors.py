"""Writes checkpoints whose values depend on their config; lists entry points that read configs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from command import run
from safetensors.torch import save_file

import loadstone

FIELDS = ("code", "path", "field", "byte_offset")
NAME = "model.layers.0.mlp.up_proj.weight"


def fp8(folder: Path, config: str) -> Path:
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(192, 192, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2, generator=generator) + 0.5
    save_file({NAME: codes, f"{NAME}_scale_inv": scales}, folder / "model.safetensors")
    (folder / "config.json").write_text(config, encoding="utf-8")
    return folder


def gptq(folder: Path, config: dict[str, Any] | None, own: dict[str, Any] | None = None) -> Path:
    """Write a 4-bit matrix; ``config`` goes to config.json, ``own`` to quantize_config.json."""
    folder.mkdir()
    module = NAME.removesuffix(".weight")
    tensors = {
        f"{module}.qweight": torch.full((8, 64), 0x12345678, dtype=torch.int32),
        f"{module}.qzeros": torch.full((1, 8), 0x55555555, dtype=torch.int32),
        f"{module}.scales": torch.ones(1, 64).half(),
        f"{module}.g_idx": torch.zeros(64, dtype=torch.int32),
    }
    save_file(tensors, folder / "model.safetensors")
    section = {} if config is None else {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | section))
    if own is not None:
        (folder / "quantize_config.json").write_text(json.dumps(own))
    return folder


def plain(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({NAME: torch.ones(64, 64)}, folder / "model.safetensors")
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return folder


def by_command(*arguments: object) -> None:
    done = run(*arguments, "--json")
    if done.returncode != 0:
        error = json.loads(done.stdout)["error"]
        raise loadstone.Error(error["message"], **{key: error[key] for key in FIELDS})


def _opened(folder: Path, out: Path) -> torch.Tensor:
    with loadstone.open(folder) as checkpoint:
        return checkpoint[NAME]


DOORS: dict[str, Callable[[Path, Path], Any]] = {
    "convert": lambda folder, out: loadstone.convert(folder, out, dequantize=True),
    "merge": lambda folder, out: loadstone.merge({folder: 0.5, f"{folder}/": 0.5}, out),
    "open": _opened,
    "load_file": lambda folder, out: loadstone.load_file(folder),
    "plan": lambda folder, out: loadstone.plan(torch.nn.Linear(192, 192, False), folder),
    "command": lambda folder, out: by_command("convert", folder, out, "--dequantize"),
    "verify": lambda folder, out: by_command("verify", folder),
}
PLAIN_DOORS: dict[str, Callable[[Path, Path], Any]] = {
    "convert": lambda folder, out: loadstone.convert(folder, out, dtype="bfloat16"),
    "quantize": lambda folder, out: loadstone.convert(folder, out, quantize="fp8-channel"),
    "command": lambda folder, out: by_command("convert", folder, out, "--dtype", "bf16"),
}
