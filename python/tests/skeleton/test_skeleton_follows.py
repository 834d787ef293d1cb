"""Tests that each load recomputes the tensors that are derived from parameters."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import loadstone


def build(make):
    with loadstone.skeleton():
        return make()


class Follows(nn.Module):
    """A module with buffers and a view that are derived from the parameter ``w``."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))
        self.register_buffer("doubled", self.w.detach() * 2, persistent=False)
        self.register_buffer("saved", self.w.detach() * 3)
        self.also = self.doubled
        self.view = self.w[:2]


def follows(model, value, saved):
    parts = (model.doubled, model.also, model.view)
    expected = (torch.full((3,), 2 * value), torch.full((3,), 2 * value), torch.full((2,), value))
    assert all(torch.equal(a.float(), b) for a, b in zip(parts, expected, strict=True))
    assert model.also is model.doubled and torch.equal(model.saved.float(), torch.full((3,), saved))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_each_load_computes_what_follows_from_parameters(dtype, in_place, tmp_path):
    """Each load computes derived tensors, but no load changes a value from the checkpoint."""
    model = build(Follows)
    for value in (1.0, 5.0, 8.0):
        state = {"w": torch.full((3,), value), "saved": torch.full((3,), 64.0)}
        save_file(state, tmp_path / "m.safetensors")
        report = loadstone.load(model, tmp_path / "m.safetensors", dtype=dtype, in_place=in_place)
        follows(model, value, 64.0)
        assert "recomputed" in report.provenance["doubled"].reason
        assert loadstone.audit(model).ok and not loadstone.audit(model).changed
    model.w.data.fill_(9.0)  # control: only a load recomputes
    assert model.doubled[0] == 16.0
