"""Defines a small Llama, and reads reference data that llama.cpp's own converter made from it.

`python python/tests/support/llama_cpp_golden.py` writes the data again, if LOADSTONE_LLAMA_CPP is
set.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).with_name("llama_cpp_golden")
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
RULES = FOLDER / "rules.json"  # of the networks below, for conversions by rules
NETWORKS = ("llama", "qwen3-moe", "deepseek2")


def values(shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """Return the model's tensors, whose rows are all different."""
    made = {}
    for index, (name, shape) in enumerate(sorted(shapes.items())):
        numbers = torch.arange(math.prod(shape), dtype=torch.int64) * (2 * index + 1) % 8191
        made[name] = ((numbers - 4095).to(torch.float32) / 512).to(torch.bfloat16).reshape(shape)
    return made


def digest(reader: Any) -> str:
    """Return a digest of the names, shapes, types and bytes of a GGUF file's tensors, in order."""
    found = hashlib.sha256()
    for each in reader.tensors:
        head = f"{each.name} {each.shape.tolist()} {each.tensor_type.name}\n"
        found.update(head.encode() + each.data.tobytes())
    return found.hexdigest()


def with_values(model: Path) -> dict[str, list[int]]:
    """Replace the values of a model's tensors, and return their shapes."""
    file = model / "model.safetensors"
    shapes = {name: list(value.shape) for name, value in load_file(file).items()}
    save_file(values(shapes), file)
    return shapes


def write_rules_data() -> None:
    """Write config, shapes, and a digest and the keys of the converter's file for each network."""
    import llama_cpp_networks as networks
    import llama_cpp_oracle as oracle

    rows = {}
    for name in NETWORKS:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            converter = oracle.with_any_tokenizer(patch)
            model = networks.make(name, Path(folder, "model"))
            shapes = with_values(model)
            own = oracle.written(converter, model, Path(folder, "own.gguf"), "BF16")
            reader = oracle.read(own)
            config = json.loads((model / "config.json").read_text())
        keys = [row for row in oracle.keys_of(reader) if not row[0].startswith("tokenizer.")]
        rows[name] = {"sha256": digest(reader), "keys": keys, "config": config, "shapes": shapes}
    lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    RULES.write_text("{" + ",\n".join(lines) + "}\n")


def main() -> None:
    import llama_cpp_networks as networks
    import llama_cpp_oracle as oracle

    from loadstone import llama_cpp

    FOLDER.mkdir(exist_ok=True)
    write_rules_data()
    with tempfile.TemporaryDirectory() as folder:
        model = networks.make("llama", Path(folder, "model"), **SIZES)
        shapes = with_values(model)
        llama_cpp.save_recipes(model, FOLDER / "llama", converter=oracle.FOLDER, dtype="BF16")
        own = oracle.written(oracle.converter(), model, Path(folder, "own.gguf"), "BF16")
        facts = {"sha256": digest(oracle.read(own)), "shapes": shapes}
        (FOLDER / "llama.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
