"""Tests that quantizing only one of two tied names is an error, whichever name the file has."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import loadstone

pytest.importorskip("bitsandbytes")


class Net(nn.Module):
    """An embedding, a head and a layer; ``first`` names the one that is registered first."""

    def __init__(self, first: str, is_tied: bool = True) -> None:
        super().__init__()
        made = {"embed": nn.Embedding(64, 64), "head": nn.Linear(64, 64, bias=False)}
        for name in sorted(made, key=lambda name: name != first):
            self.add_module(name, made[name])
        if is_tied:
            made["head"].weight = made["embed"].weight
        self.middle = nn.Linear(64, 64, bias=False)


def file_of(folder: Path, *names: str) -> Path:
    path = folder / "net.safetensors"
    save_file({f"{name}.weight": torch.randn(64, 64) for name in (*names, "middle")}, path)
    return path


@pytest.mark.parametrize("is_skeleton", [True, False], ids=["skeleton", "memory"])
@pytest.mark.parametrize("encoding", ["nf4", "int8"])
@pytest.mark.parametrize("pattern", ["head", ".*"])
@pytest.mark.parametrize("stored", ["embed", "head"])
@pytest.mark.parametrize("first", ["embed", "head"])
def test_one_name_of_a_tie(
    first: str, stored: str, pattern: str, encoding: str, is_skeleton: bool, tmp_path: Path
) -> None:
    path = file_of(tmp_path, stored)
    with loadstone.skeleton() if is_skeleton else contextlib.nullcontext():
        model = Net(first)
    before = dict(model.named_modules())
    with pytest.raises(loadstone.PlanError, match=r"'head\.weight' cannot be quantized") as caught:
        loadstone.load(model, path, quantize={pattern: encoding})
    assert caught.value.code == "plan.quantize" and "embed.weight" in str(caught.value)
    assert dict(model.named_modules()) == before


@pytest.mark.parametrize("encoding", ["nf4", "int8"])
def test_control_other_layers_and_heads_of_their_own(encoding: str, tmp_path: Path) -> None:
    path = file_of(tmp_path, "embed")
    for quantize in (encoding, {"middle": encoding}):
        model = Net("embed")
        loadstone.load(model, path, quantize=quantize)
        assert type(model.head) is nn.Linear and type(model.middle) is not nn.Linear
    model = Net("embed", is_tied=False)
    loadstone.load(model, file_of(tmp_path, "embed", "head"), quantize={"head": encoding})
    assert type(model.head) is not nn.Linear
