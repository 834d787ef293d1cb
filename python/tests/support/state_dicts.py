"""Writes state dicts to files, and computes the result of ``load_state_dict``."""

from __future__ import annotations

import copy
from collections import OrderedDict

import torch
from safetensors.torch import save_file

import loadstone


def save(state, folder, kind):
    """Save a state dict; return the file, and the state dict that torch would read from it."""
    tensors = OrderedDict((name, tensor.contiguous()) for name, tensor in state.items())
    path = folder / f"m.{kind}"
    if kind == "safetensors":
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
        return path, tensors
    if hasattr(state, "_metadata"):
        tensors._metadata = state._metadata
    torch.save(tensors, path)
    return path, torch.load(path)


def reference(make, state):
    model = make()
    found = model.load_state_dict(copy.copy(state), strict=False)
    return model, found


def assert_same(model, expected):
    ours, theirs = model.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if isinstance(tensor, torch.Tensor):
            assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


def codes(model, path, **options):
    plan = loadstone.plan(model, path, **options)
    return {finding.code for finding in plan.findings if finding.severity == "error"}
