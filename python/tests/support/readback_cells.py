"""Lists the cells of the read-back matrix: outputs of ``loadstone convert`` and their sources.

A cell is an encoding, a style and a source. The encodings come from the text of an error, so each
new codec gets its cells automatically.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from readback_oracles import numbers_in
from safetensors.torch import load_file, save_file
from transformers_models import randomise_all, write_state

import loadstone

Tensors = dict[str, torch.Tensor]

# Sizes that make rows whole blocks of every encoding, and matrices several 128x128 blocks.
_FIELDS: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Paths of expert modules and names of their weights, in published checkpoints and in models.
_NAMES_OF_EXPERTS = (
    ("block_sparse_moe.experts", ("w1", "w3", "w2")),
    ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
)
_EXPERTS = {
    "qwen3_moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe.experts", ("w1", "w3", "w2")),
}
_EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1}


@dataclasses.dataclass(frozen=True)
class Source:
    """A model and the layout of its file.

    Attributes:
        layout: ``"separate"`` for one tensor per expert, as published; ``"fused"`` for
            transformers' own layout.
        shard_size: size of the output's shards; ``None`` for one file.
    """

    model: str
    layout: str = "separate"
    shard_size: int | None = None

    def __str__(self) -> str:
        shards = "one file" if self.shard_size is None else "shards"
        return f"{self.model}, {self.layout}, {shards}"

    @property
    def has_experts(self) -> bool:
        return self.model != "llama"


SOURCES = (
    Source("llama"),
    Source("qwen3_moe", shard_size=200_000),
    Source("qwen3_moe", "fused"),
    Source("mixtral"),
    Source("mixtral", "fused", 200_000),
)
STYLES = ("modelopt", "compressed-tensors")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One way of writing a checkpoint.

    Attributes:
        style: ``None`` if the encoding supports none of ``STYLES``, and has its own style.
    """

    encoding: str
    style: str | None
    source: Source

    def __str__(self) -> str:
        return f"{self.encoding}-{self.style or 'own'}-{self.source}".replace(", ", "-")

    @property
    def options(self) -> dict[str, Any]:
        return {
            "quantize": self.encoding,
            "style": self.style,
            "shard_size": self.source.shard_size,
        }


@functools.cache
def written_encodings() -> tuple[str, ...]:
    """Return the names of all encodings that convert can write, from the text of an error."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "any.safetensors")
        save_file({"a.weight": torch.zeros(1)}, path)
        try:
            loadstone.convert(path, Path(folder, "out"), quantize="?")
        except loadstone.Error as error:
            words = re.split(", | or ", error.message.partition("; expected ")[2])
            return tuple(word for word in words if word != "none")
    raise AssertionError("an encoding of no name was written")


@functools.cache
def styles_of(encoding: str) -> tuple[str | None, ...]:
    """Return the styles that support an encoding; ``(None,)`` if it supports only its own style."""
    found = tuple(style for style in STYLES if _is_held(encoding, style))
    return found or ((None,) if _is_held(encoding, None) else ())


def _is_held(encoding: str, style: str | None) -> bool:
    """Return true if convert can write the encoding in this style."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "any.safetensors")
        save_file({"a.weight": torch.zeros(1)}, path)
        try:
            loadstone.convert(path, Path(folder, "out"), quantize=encoding, style=style)
        except loadstone.Error as error:
            if error.code not in ("plan.options", "convert.left_alone"):
                raise
            return error.code != "plan.options"  # other errors are due to the test's small vector
        return True


def cells() -> list[Cell]:
    return [
        Cell(encoding, style, source)
        for encoding in written_encodings()
        for style in styles_of(encoding)
        for source in SOURCES
    ]


def refused() -> list[tuple[str, str]]:
    """Return pairs of an encoding and a style that does not support the encoding."""
    return [
        (encoding, style)
        for encoding in written_encodings()
        for style in STYLES
        if style not in styles_of(encoding)
    ]


def write_source(source: Source, folder: Path) -> Path:
    """Write a random model in BF16, with weights as large as a trained model's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = _FIELDS | ({**_EXPERTS, "moe_intermediate_size": 128} if source.has_experts else {})
    if source.model == "mixtral":
        fields["intermediate_size"] = 128
    config = AutoConfig.for_model(source.model, **fields)
    config.dtype = torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    randomise_all(model, seed=5)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.mul_(0.05 if tensor.dim() > 1 else 1)
    if source.layout == "separate":
        model.save_pretrained(folder)
    else:
        folder.mkdir(parents=True)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        write_state({n: t.clone() for n, t in model.state_dict().items()}, folder)
    return folder


@dataclasses.dataclass(frozen=True)
class Output:
    """A cell that was written.

    Attributes:
        folder: the conversion's output.
        exact: values of all tensors, decoded in F32 by the library that defines the layout.
    """

    folder: Path
    exact: Tensors

    @property
    def numbers(self) -> Tensors:
        """The values rounded to BF16, which is the dtype of the sources."""
        return {name: _rounded(tensor) for name, tensor in self.exact.items()}


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def write_cell(cell: Cell, source: Path, folder: Path) -> Output:
    """Convert the source, and decode the output with the library that defines its layout."""
    loadstone.convert(source, folder, **cell.options)
    return Output(folder, numbers_in(folder))


def model_state(numbers: Tensors, source: Source) -> Tensors:
    """Return values under transformers' names, which fuse a layer's experts into two tensors."""
    found = dict(numbers)
    if not source.has_experts:
        return found
    stem, leaves = next(
        names for names in _NAMES_OF_EXPERTS if any(names[0] in name for name in found)
    )
    for layer in range(_FIELDS["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        each = [
            [found.pop(f"{path}.{stem}.{index}.{leaf}.weight") for leaf in leaves]
            for index in range(_EXPERTS["num_experts"])
        ]
        gates = torch.stack([torch.cat([gate, up]) for gate, up, _ in each])
        found[f"{path}.mlp.experts.gate_up_proj"] = gates
        found[f"{path}.mlp.experts.down_proj"] = torch.stack([down for *_, down in each])
    return {name.replace("block_sparse_moe.", "mlp."): t for name, t in found.items()}


def tensors_of(path: Path) -> Tensors:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
