"""``load_state_dict`` hooks that rename or rearrange tensors, and a model with such hooks."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

import loadstone


def rename(module, state, prefix, *_):
    for name in [name for name in state if name.startswith(prefix + "old_")]:
        state[prefix + name[len(prefix) + 4 :]] = state.pop(name)


def split(module, state, prefix, *_):
    both = state.pop(prefix + "both")
    state[prefix + "weight"], state[prefix + "extra"] = both.chunk(2)


def join(module, state, prefix, *_):
    rows = [state.pop(f"{prefix}row{index}") for index in range(4)]
    state[prefix + "weight"] = torch.stack(rows, dim=1)


def transpose(module, state, prefix, *_):
    state[prefix + "weight"] = state[prefix + "weight"].transpose(0, 1)


def convolution(module, state, prefix, *_):
    state[prefix + "weight"] = state[prefix + "weight"].squeeze(-1).squeeze(-1)


def swap(module, state, prefix, *_):
    one, other = prefix + "weight", prefix + "extra"
    state[one], state[other] = state[other], state[one]


def pad(module, state, prefix, *_):
    state[prefix + "extra"] = torch.arange(16.0).view(4, 4)


def overwrite(module, state, prefix, *_):
    state[prefix + "weight"] = torch.full((4, 4), 3.0)
    state[prefix + "extra"] = state.pop(prefix + "other").flip(1)


def zeros(module, state, prefix, *_):
    state[prefix + "extra"] = torch.zeros_like(state[prefix + "weight"])


def cast(module, state, prefix, *_):
    state[prefix + "weight"] = state[prefix + "weight"].float().T


def as_parameter(module, state, prefix, *_):
    whole = nn.Parameter(state.pop(prefix + "w"))
    state[prefix + "weight"] = whole.data.reshape(4, 4).clone().requires_grad_()


def drop(module, state, prefix, *_):
    state.pop(prefix + "junk", None)
    state.pop(prefix + "position_ids", None)


def own(module, state, prefix, *_):
    state[prefix + "extra"] = module.extra.detach().clone()


def own_first(module, state, prefix, *_):
    state[prefix + "extra"] = module.extra


def versions(module, state, prefix, metadata, *_):
    if metadata.get("version", 0) < 2:
        state[prefix + "weight"] = state[prefix + "weight"].flip(0)


W = (4, 4)
MOVES = {
    rename: {"old_weight": W, "old_extra": W},
    split: {"both": (8, 4)},
    join: {"row0": 4, "row1": 4, "row2": 4, "row3": 4, "extra": W},
    transpose: {"weight": W, "extra": W},
    convolution: {"weight": (4, 4, 1, 1), "extra": W},
    swap: {"weight": W, "extra": W},
    pad: {"weight": W},
    as_parameter: {"w": 16, "extra": W},
    zeros: {"weight": W},
    overwrite: {"weight": W, "extra": W, "other": W},
    drop: {"weight": W, "extra": W, "junk": 2, "position_ids": 3},
    own: {"weight": W},
    own_first: {"weight": W, "extra": W},
    versions: {"weight": W, "extra": W},
}


PLACES = {
    "real": torch.no_grad,
    "skeleton": loadstone.skeleton,
    "meta": lambda: torch.device("meta"),
}


class Two(nn.Module):
    _version = 2

    def __init__(self, hook=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.register_buffer("extra", torch.full((4, 4), 2.0))
        if hook is not None:
            self.register_load_state_dict_pre_hook(hook)


class Nested(nn.Module):
    def __init__(self, hook=None):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))
        self.blocks = nn.ModuleList([Two(), Two(hook)])


def state_for(hook):
    state = OrderedDict(
        (f"blocks.1.{name}", torch.randn(size)) for name, size in MOVES[hook].items()
    )
    state |= {
        "bias": torch.randn(3),
        "blocks.0.weight": torch.randn(W),
        "blocks.0.extra": torch.randn(W),
    }
    state._metadata = {"": {"version": 1}, "blocks.1": {"version": 1}}
    return state
