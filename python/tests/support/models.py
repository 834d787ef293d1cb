"""Small models and checkpoints for several tests. All floats are random, even norms and biases."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


class Block(torch.nn.Module):
    """A layer with parameters, a saved and an unsaved buffer, and a tensor in a list."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.linear = torch.nn.Linear(width, width)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))
        self.register_buffer("angles", torch.arange(width) * 0.1, persistent=False)
        self.freqs = [torch.arange(width, dtype=torch.float64) + 0.25]


class Tiny(torch.nn.Module):
    """Two blocks between an embedding and a head that share a weight."""

    def __init__(self, width: int = 8, vocabulary: int = 16) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(2))
        self.head = torch.nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states = self.embed(tokens)
        for block in self.blocks:
            states = block.linear(block.norm(states)) * block.scale + block.angles
        return self.head(states)


def randomise(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Fill every parameter and persistent floating buffer with random values."""
    generator = torch.Generator().manual_seed(seed)
    state = model.state_dict()
    with torch.no_grad():
        for tensor in state.values():
            if tensor.is_floating_point():
                values = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(values.to(tensor.dtype))
    return model


def save(model: torch.nn.Module, path: Path, dtype: torch.dtype | None = None) -> dict:
    """Save the state dict with each tie once; return the saved tensors."""
    seen, state = set(), {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() in seen and tensor.numel():
            continue
        seen.add(tensor.data_ptr())
        keep = tensor.detach().clone().contiguous()
        state[name] = keep.to(dtype) if dtype and keep.is_floating_point() else keep
    save_file(state, path)
    return state


def save_sharded(state: dict, folder: Path, shards: int = 3) -> list[Path]:
    """Save a state dict in shards with an index; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    names, weight_map, files = sorted(state), {}, []
    for number in range(shards):
        part = {name: state[name] for name in names[number::shards]}
        file = folder / f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, file)
        files.append(file)
        weight_map.update(dict.fromkeys(part, file.name))
    total = sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return files


def all_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name, with every name of a tie."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))


def assert_same(model: torch.nn.Module, reference: torch.nn.Module) -> None:
    """Compare names, dtypes and bits."""
    mine, theirs = all_tensors(model), all_tensors(reference)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name
