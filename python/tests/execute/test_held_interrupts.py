"""Ctrl-C while loadstone undoes a failed load leaves the model unchanged."""

from __future__ import annotations

import contextlib
import importlib
import signal

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import loadstone

STEPS = {
    "the first exchange": "loadstone._model.tensor_swap.TensorSwap.undo",
    "the memory": "loadstone._execute.destinations.Destinations.undo",
    "the offload folder": "loadstone._execute.execute.FilledValues.offload",
    "a place of the model": "loadstone._model.walk.TensorSlot.put_back",
    "the audit": "loadstone._execute.audit.LoadRecords.restore",
}


class TwoKinds(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, 3))
        self.x = nn.Parameter(torch.zeros(3, 3))


def interrupted_twice(step, tmp_path, monkeypatch):
    """Make a load fail, and interrupt one step of undoing it; return the model's state."""
    from loadstone._execute import execute

    state = {"w": torch.ones(3, 3), "x": torch.ones(3, 3)}
    save_file(state, tmp_path / "m.safetensors")
    with loadstone.skeleton():
        model = TwoKinds()
    model.x = nn.Parameter(torch.zeros(3, 3))
    before, pressed = dict(model.named_parameters()), []
    owner, _, name = STEPS[step].rpartition(".")
    module, _, cls = owner.rpartition(".")
    owner = getattr(importlib.import_module(module), cls)
    original = getattr(owner, name)

    def press(*arguments):
        if failing and not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)
        return original.fget(*arguments) if isinstance(original, property) else original(*arguments)

    failing = []

    def fail(*_):
        failing.append(True)
        raise RuntimeError("injected")

    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        is_property = isinstance(original, property)
        patch.setattr(owner, name, property(press) if is_property else press)
        patch.setattr(execute, "make_report", fail)
        loadstone.load(model, tmp_path / "m.safetensors", dtype=torch.bfloat16)
    assert pressed and signal.getsignal(signal.SIGINT) is handler
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in after)
    return model.w.is_meta and model.x.dtype == torch.float32 and not model.x.any()


@pytest.mark.parametrize("step", STEPS)
def test_ctrl_c_waits_until_a_failed_load_is_undone(step, tmp_path, monkeypatch):
    assert interrupted_twice(step, tmp_path, monkeypatch)


def test_control_without_the_wait_the_model_is_left_between(tmp_path, monkeypatch):
    monkeypatch.setattr("loadstone._execute.execute.delay_interrupts", contextlib.nullcontext)
    assert not interrupted_twice("the memory", tmp_path, monkeypatch)
