"""Builds small checkpoints, together with the values that an oracle decodes from them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A quantized tensor as ``loadstone inspect`` should list it.

    Attributes:
        encoding: loadstone's name of the encoding.
        components: names of the file's tensors by role: ``data``, ``scale``, ``absmax`` ...
    """

    encoding: str
    components: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Written:
    """A checkpoint on disk, and its expected content.

    Attributes:
        path: the path to load.
        numbers: values by logical name: decoded to F32 if quantized, else as stored.
        quantized: the quantized tensors by logical name.
        stored: every tensor of a safetensors file, undecoded; empty for other formats.
    """

    path: Path
    numbers: Tensors
    quantized: dict[str, Quantized]
    stored: Tensors

    @property
    def tensor_names(self) -> set[str]:
        """The names of the tensors in the file, including each component."""
        if self.stored:
            return set(self.stored)
        return set(self.numbers)

    @property
    def companions(self) -> set[str]:
        """The names of companion tensors, and of all components except the data."""
        plain = set(self.numbers) - set(self.quantized)
        data = {value.components["data"] for value in self.quantized.values()}
        return self.tensor_names - plain - data


class Checkpoint:
    """Collects the tensors of a checkpoint in the order of writing. Not thread-safe."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.stored: Tensors = {}
        self.numbers: Tensors = {}
        self.quantized: dict[str, Quantized] = {}
        self.metadata: dict[str, str] = {"format": "pt"}
        self.config: dict[str, Any] | None = None

    def add_plain(self, name: str, tensor: torch.Tensor) -> None:
        self.stored[name] = tensor
        self.numbers[name] = tensor

    def add(
        self,
        name: str,
        encoding: str,
        components: dict[str, tuple[str, torch.Tensor]],
        numbers: torch.Tensor,
        stem: str | None = None,
    ) -> None:
        """Add a quantized tensor.

        Args:
            components: by role, the tensor and the suffix after ``stem`` that makes its name.
            numbers: the oracle's decoded values, in F32.
            stem: start of the components' names; ``name`` by default.
        """
        stem = name if stem is None else stem
        assert numbers.dtype == torch.float32 and numbers.isfinite().all()
        for suffix, tensor in components.values():
            self.stored[stem + suffix] = tensor.contiguous()
        names = {role: stem + suffix for role, (suffix, _) in components.items()}
        self.numbers[name] = numbers.contiguous()
        self.quantized[name] = Quantized(encoding, names)

    def add_beside(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor that does not affect decoded values, such as a scale of activations."""
        self.stored[name] = tensor

    def add_layers(self) -> None:
        self.add_plain("embed.weight", self.normal(11, 6).bfloat16())
        self.add_plain("norm.weight", self.normal(13))
        self.add_plain("head.bias", self.normal(5).half())

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def uniform(self, low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def bytes(self, *shape: int) -> torch.Tensor:
        return self.integers(0, 256, *shape).to(torch.uint8)

    def fp8(self, *shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
        """Return finite codes; for E5M2, only values that stay finite in F16 after scaling."""
        if dtype == torch.float8_e4m3fn:
            size, sign = self.integers(0, 0x7F, *shape), self.integers(0, 2, *shape) * 128
        else:
            size, sign = self.integers(0, 0x60, *shape), self.integers(0, 2, *shape) * 128
        return (size + sign).to(torch.uint8).view(dtype)

    def save(self, folder: Path) -> Written:
        """Write one safetensors file, and the config if there is one."""
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "model.safetensors"
        save_file(self.stored, file, metadata=self.metadata)
        if self.config is not None:
            (folder / "config.json").write_text(json.dumps(self.config))
        return self.written(folder if self.config is not None else file)

    def written(self, path: Path) -> Written:
        return Written(path, dict(self.numbers), dict(self.quantized), dict(self.stored))


def save_shards(made: Checkpoint, folder: Path, count: int = 3) -> Written:
    """Write several files with an index; neighbouring names go to different files."""
    folder.mkdir(parents=True, exist_ok=True)
    names, weight_map = sorted(made.stored), {}
    for number in range(count):
        part = {name: made.stored[name] for name in names[number::count]}
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        save_file(part, folder / file, metadata=made.metadata)
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in made.stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return made.written(folder)
