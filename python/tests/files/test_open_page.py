"""Runs the example of docs/open.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

PAGE = Path(__file__).resolve().parents[3] / "docs/open.md"
NAME = "model.embed_tokens.weight"


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(300, 8)
    (tmp_path / "checkpoint").mkdir()
    save_file({NAME: weight}, tmp_path / "checkpoint/model.safetensors")
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    space: dict[str, Any] = {}
    exec(example, space)
    assert torch.equal(space["rows"], weight[:128]) and space["ckpt"].bytes_read >= 128 * 32
    assert torch.equal(space["whole"], weight.bfloat16())
    assert torch.equal(space["parts"]["data"], weight)
    assert torch.equal(space["tensors"][NAME], weight.bfloat16())
