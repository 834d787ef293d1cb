"""bitsandbytes weights of Conv1D layers are stored transposed, and only config.json declares it:
without a config loadstone reads the file as nn.Linear, and each entry point warns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run
from safetensors.torch import load_file, save_file

import loadstone

CODE = "q.layout_assumed"
NAME = "h.0.attn.c_proj.weight"  # square, so the shape does not show the layout
CONFIGS: dict[str, Any] = {"gpt2": {"model_type": "gpt2"}, "starcoder2": {}, "none": None}


def checkpoint(folder: Path, encoding: str, config: Any, name: str = NAME) -> Path:
    """Write a quantized file with GPT-2's names as transformers stores it, and
    ``plain.safetensors``."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(64, 64, generator=generator), "ln.weight": torch.ones(64)}
    save_file(tensors, folder / "plain.safetensors")
    loadstone.convert(
        folder / "plain.safetensors", folder / "q" / "", quantize=encoding, include=".*"
    )
    file = folder / "q" / "config.json"
    file.unlink(missing_ok=True)
    if config is not None:
        file.write_text(json.dumps(config))
    return folder / "q"


class Net(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        module: torch.nn.Module = self
        *path, leaf, _ = name.split(".")
        for part in path:
            module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.add_module(leaf, torch.nn.Linear(64, 64, bias=False))
        self.ln = torch.nn.LayerNorm(64, bias=False)


def by_plan(source: Path, name: str) -> list[str]:
    with loadstone.skeleton():
        model = Net(name)
    return [each.code for each in loadstone.plan(model, source).findings]


def by_load(source: Path, name: str) -> list[str]:
    with loadstone.skeleton():
        model = Net(name)
    return [each.code for each in loadstone.load(model, source).findings]


def by_convert(source: Path, name: str) -> list[str]:
    target = source.with_name("numbers.safetensors")
    report = loadstone.convert(source, target, dequantize=True, dtype="float32")
    assert name in load_file(target)
    return [each.code for each in report.findings]


def by_inspect(source: Path, name: str) -> list[str]:
    return [CODE] * run("inspect", source).stdout.count(CODE)


def by_command(source: Path, name: str) -> list[str]:
    done = run("convert", source, source.with_name("n.safetensors"), "--dequantize")
    assert done.returncode == 0, done.stderr
    return [CODE] * done.stderr.count(CODE)


def by_strict_command(source: Path, name: str) -> list[str]:
    done = run("convert", source, source.with_name("s.safetensors"), "--dequantize", "--strict")
    assert (done.returncode != 0) == (CODE in done.stderr), done.stderr
    return [CODE] * (done.returncode != 0)


DOORS: list[Callable[[Path, str], list[str]]] = [
    by_plan,
    by_load,
    by_convert,
    by_inspect,
    by_command,
    by_strict_command,
]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("encoding", ["nf4", "fp4", "int8"])
def test_a_layout_that_nothing_tells_is_a_warning(
    encoding: str, config: str, door: Callable[[Path, str], list[str]], tmp_path: Path
) -> None:
    source = checkpoint(tmp_path, encoding, CONFIGS[config])
    assert door(source, NAME).count(CODE) == (config == "none")


@pytest.mark.parametrize("door", DOORS)
def test_other_names_need_no_config(door: Callable[[Path, str], list[str]], tmp_path: Path) -> None:
    name = "h.0.attn.q_proj.weight"
    source = checkpoint(tmp_path, "nf4", None, name)
    assert door(source, name).count(CODE) == 0


@pytest.mark.parametrize("encoding", ["nf4", "int8"])
def test_the_config_decides_the_layout(encoding: str, tmp_path: Path) -> None:
    """Control: the two outputs are transposes of each other."""
    found = {}
    for config, value in CONFIGS.items():
        (tmp_path / config).mkdir()
        source = checkpoint(tmp_path / config, encoding, value)
        found[config] = loadstone.open(source, dtype="float32")[NAME][:]
    assert torch.equal(torch.as_tensor(found["gpt2"]), torch.as_tensor(found["none"]).T)
    assert torch.equal(torch.as_tensor(found["starcoder2"]), torch.as_tensor(found["none"]))
