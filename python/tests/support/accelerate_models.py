"""Defines a plain model for the tests of accelerate, and compares loaded models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.utils import OffloadedWeightsLoader
from models import randomise, save

TOKENS = torch.tensor([[1, 5, 2, 7]])


class Layer(torch.nn.Module):
    """A module whose forward pass uses tensors of its children only through their forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.linear = torch.nn.Linear(width, width)
        self.shift = Shift(width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + self.shift(self.linear(self.norm(states)))


class Shift(torch.nn.Module):
    """A module with a parameter not named `weight`, and with saved and unsaved buffers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(width), requires_grad=False)
        self.register_buffer("offset", torch.zeros(width))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("ramp", torch.arange(width) / width, persistent=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        ramp = self.ramp.to(states.dtype)
        return states * self.gain + self.offset.to(states.dtype) * self.count + ramp


class Net(torch.nn.Module):
    def __init__(self, width: int = 8, vocabulary: int = 16) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, width)
        self.layers = torch.nn.ModuleList(Layer(width) for _ in range(3))
        self.head = torch.nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states = self.embed(tokens)
        for layer in self.layers:
            states = layer(states)
        return self.head(states)


class TiedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def empty(cls: type = Net, **options: Any) -> Any:
    """Build the model as users of accelerate do: parameters on meta, then ties."""
    with init_empty_weights(**options):
        model = cls()
    if cls is TiedNet:
        model.head.weight = model.embed.weight
    return model


def saved(folder: Path, cls: type = Net, dtype: torch.dtype | None = None) -> tuple[Any, Path]:
    """Write a checkpoint of a model with random values; return the model and the path."""
    folder.mkdir(parents=True, exist_ok=True)
    model = randomise(cls())
    save(model, folder / "model.safetensors", dtype)
    return model, folder / "model.safetensors"


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return all tensors by name; for tensors on meta, the values that a hook reads from disk."""
    found = dict(model.named_parameters(remove_duplicate=False))
    found |= dict(model.named_buffers(remove_duplicate=False))
    for path, module in model.named_modules():
        weights = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        for name, parameter in [*module._parameters.items(), *module._buffers.items()]:
            if parameter is not None and parameter.is_meta and weights is not None:
                full = f"{path}.{name}" if path else name
                assert isinstance(weights.dataset, OffloadedWeightsLoader)
                found[full] = weights[name].to(parameter.dtype)
    return found


def facts(model: Any) -> dict[str, Any]:
    """Return the properties other than values that must be equal in two loaded models."""
    hooks = {}
    for path, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        if hook is not None:
            names = ("execution_device", "offload", "offload_buffers", "io_same_device",
                     "place_submodules", "skip_keys")  # fmt: skip
            inner = getattr(hook, "hooks", [hook])
            hooks[path] = [
                (type(each), {name: getattr(each, name, None) for name in names}) for each in inner
            ]
    everything = list(model.named_parameters(remove_duplicate=False))
    everything += list(model.named_buffers(remove_duplicate=False))
    return {
        "hooks": hooks,
        "map": getattr(model, "hf_device_map", None),
        "tensors": {
            name: (type(each), each.dtype, each.device, each.requires_grad, each.shape)
            for name, each in everything
        },
        "training": model.training,
    }


def assert_alike(ours: Any, theirs: Any) -> None:
    """Compare facts, values and outputs; outputs last, because a forward pass moves tensors."""
    assert facts(ours) == facts(theirs)
    mine, other = tensors(ours), tensors(theirs)
    for name, tensor in mine.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name
    with torch.no_grad():
        assert torch.equal(ours(TOKENS), theirs(TOKENS))
