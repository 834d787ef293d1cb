"""Compares loadstone's mixes with llama.cpp's own llama-quantize on llama.cpp's own files.

LOADSTONE_LLAMA_QUANTIZE names the program, built without fused multiply-adds
(docs/design/tests.md); tests that need the program skip if the variable is not set. Run as a
program, this file stores llama-quantize's results for a small model, for tests without it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import imatrix_files
import llama_cpp_golden
import llama_cpp_oracle as oracle
import pytest
from safetensors.torch import save_file

import loadstone

PROGRAM = os.environ.get("LOADSTONE_LLAMA_QUANTIZE", "")

GOLDEN = Path(__file__).with_name("llama_cpp_golden") / "mixes.json"
MIXES = [
    "f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q2_k_s", "q3_k_s",
    "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k", "iq1_s", "iq1_m",
    "iq2_xxs", "iq2_xs", "iq2_s", "iq2_m", "iq3_xxs", "iq3_xs", "iq3_s", "iq3_m", "iq4_nl",
    "iq4_xs", "tq1_0", "tq2_0", "mxfp4_moe",
]  # fmt: skip


def require_program() -> None:
    if not PROGRAM:
        pytest.skip("LOADSTONE_LLAMA_QUANTIZE names no llama-quantize")


def run(source: Path, target: Path, mix: str, imatrix: Path | None = None) -> str:
    """Run llama-quantize; return its messages if it fails, otherwise an empty string."""
    options = [] if imatrix is None else ["--imatrix", str(imatrix)]
    done = subprocess.run(
        [PROGRAM, *options, source, target, mix, "2"], capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr if done.returncode else ""


def content(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a file's keys with types and values, and its tensors with shapes, types and bytes."""
    reader = oracle.read(path)
    keys = {row[0]: repr(row[1:]) for row in oracle.keys_of(reader)}
    tensors = {
        each.name: (each.shape.tolist(), each.tensor_type.name, each.data.tobytes())
        for each in reader.tensors
    }
    return keys, tensors


def require_same(path: Path, own: Path) -> None:
    """Compare all keys and tensors in any order, because llama-quantize sorts tensors."""
    keys, tensors = content(path)
    own_keys, own_tensors = content(own)
    assert keys == own_keys
    assert {name: row[:2] for name, row in tensors.items()} == {
        name: row[:2] for name, row in own_tensors.items()
    }
    different = [name for name, row in tensors.items() if row[2] != own_tensors[name][2]]
    assert not different


# --- a small model under llama.cpp's names, created without a library -----------------------------

LAYERS = 8
ROWS, COLUMNS = 8, 256
NUMBERS = {
    "block_count": LAYERS, "context_length": 64, "embedding_length": COLUMNS,
    "feed_forward_length": COLUMNS, "attention.head_count": 8, "attention.head_count_kv": 2,
}  # fmt: skip
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.attention.layer_norm_rms_epsilon": {"type": "f32", "value": 1e-5},
    **{f"llama.{key}": {"type": "u32", "value": value} for key, value in NUMBERS.items()},
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of a dense model with experts in one layer, and a row of 96 elements."""
    made: dict[str, tuple[int, ...]] = {"token_embd.weight": (32, COLUMNS)}
    made["output_norm.weight"] = (COLUMNS,)
    for layer in range(LAYERS):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            made[f"blk.{layer}.{part}.weight"] = (ROWS, COLUMNS)
    made["blk.3.ffn_up_exps.weight"] = (4, ROWS, COLUMNS)
    made["blk.3.ffn_down_exps.weight"] = (4, ROWS, 96)
    return made


def write_keys(path: Path, metadata: dict[str, Any]) -> Path:
    """Write GGUF keys in the form that the option ``--metadata`` reads."""
    entries = [
        {"key": key} | (value if isinstance(value, dict) else {"type": "string", "value": value})
        for key, value in metadata.items()
    ]
    head = {"format": "loadstone-gguf-metadata", "version": 1}
    path.write_text(json.dumps(head | {"entries": entries}))
    return path


def write_small(path: Path) -> Path:
    """Write the model as safetensors of BF16, which have no keys."""
    lists = {name: list(shape) for name, shape in shapes().items()}
    save_file(llama_cpp_golden.values(lists), path)
    return path


def digest(path: Path) -> str:
    """Return a digest of tensors and keys in any order, without the path of an imatrix."""
    keys, tensors = content(path)
    keys.pop("quantize.imatrix.file", None)
    found = hashlib.sha256(repr(sorted(keys.items())).encode())
    for name, (shape, kind, data) in sorted(tensors.items()):
        found.update(f"{name} {shape} {kind}\n".encode() + data)
    return found.hexdigest()


def main() -> None:
    digests: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = write_small(folder / "small.safetensors")
        own, out = folder / "own.gguf", folder / "out.gguf"
        loadstone.convert(source, own, metadata=METADATA, quantize="bf16")
        for kind in (None, "gguf", "dat"):
            imatrix = kind and imatrix_files.WRITERS[kind](
                folder / f"imatrix.{kind}", imatrix_files.measured(shapes())
            )
            for mix in MIXES:
                refused = run(own, out, mix, imatrix)
                digests.setdefault(str(kind), {})[mix] = "refused" if refused else digest(out)
    GOLDEN.write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
