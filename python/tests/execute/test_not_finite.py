"""Quantizing NaN or infinite values in loads, which follow the same rule as conversions.

``test_convert_quantize.py`` tests conversions, ``test_bitsandbytes_loading.py`` tests adapters.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command import run
from safetensors.torch import save_file

pytest.importorskip("bitsandbytes")
import loadstone


class OneLayer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 32, bias=False)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_plain_load_stops_at_numbers_that_are_none(kind: str, tmp_path: Path) -> None:
    """Python, a saved plan and the command reject NaN and infinity, unless the plan allows them."""
    weight = torch.randn(32, 64)
    weight[3, 5] = float("nan")
    file, saved = tmp_path / "model.safetensors", tmp_path / "plan.json"
    save_file({"layer.weight": weight}, file)
    with loadstone.skeleton():
        model = OneLayer()
    with pytest.raises(loadstone.Error) as caught:
        loadstone.load(model, file, quantize=kind)
    assert caught.value.code == "q.nan"
    assert caught.value.tensor == "layer.weight"
    assert model.layer.weight.is_meta  # unchanged
    for allows in (False, True):
        plan = loadstone.plan(model, file, quantize=kind, allow_non_finite=allows)
        plan.save(saved)
        done = run("load", "--plan", saved, "--json")
        assert ("q.nan" in done.stdout + done.stderr, done.returncode == 0) == (True, allows)
    report = loadstone.load(model, file, quantize=kind, allow_non_finite=True)
    assert [f.target for f in report.findings if f.code == "q.nan"] == ["layer.weight"]
