"""Runs llama.cpp's own converter unmodified, and compares its files with traced ones.

pip cannot install the converter. LOADSTONE_LLAMA_CPP names the folder of a checkout, or of the
unpacked source package of llama-cpp-python; tests that need it skip if it is not set.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import loadstone
from loadstone._adapters.llama_cpp.converter import Converter, converter_at

FOLDER = os.environ.get("LOADSTONE_LLAMA_CPP", "")
FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16", None: "GUESSED"}
TYPES = {
    "UINT8": "u8", "INT8": "i8", "UINT16": "u16", "INT16": "i16", "UINT32": "u32", "INT32": "i32",
    "UINT64": "u64", "INT64": "i64", "FLOAT32": "f32", "FLOAT64": "f64", "BOOL": "bool",
    "STRING": "string", "ARRAY": "array",
}  # fmt: skip


def converter() -> Converter:
    if not FOLDER:
        pytest.skip("LOADSTONE_LLAMA_CPP names no folder of llama.cpp's converter")
    pytest.importorskip("sentencepiece", reason="the converter asks for it first")
    return converter_at(FOLDER)


def written(entered: Converter, model: Path, target: Path, dtype: str | None) -> Path:
    """Run the converter itself on the model's values; return the file that it writes."""
    with entered.entered(), torch.inference_mode():
        conversion, library = entered.module("conversion"), entered.module("gguf")
        hparams = conversion.ModelBase.load_hparams(model, False)
        name = conversion.get_model_architecture(hparams, conversion.ModelType.TEXT)
        kind = getattr(library.LlamaFileType, FILE_TYPES[dtype])
        conversion.get_model_class(name)(model, kind, target).write()
    return target


def keys_of(reader: Any) -> list[tuple[str, str, str, Any]]:
    """Return key, type, item type and value of all entries, in file order."""
    rows = []
    for key, found in reader.fields.items():
        if key.startswith("GGUF."):  # gguf-py lists the file's header as keys
            continue
        types = [TYPES[each.name] for each in found.types]
        items = types[1] if types[0] == "array" else ""
        rows.append((key, types[0], items, found.contents()))
    return rows


def with_any_tokenizer(monkeypatch: pytest.MonkeyPatch) -> Converter:
    """Make the converter accept the tests' tokenizers as if it knew them."""
    own = Converter._check

    def check(entered: Converter) -> None:
        own(entered)
        entered.module("conversion.base").TextModel.get_vocab_base_pre = lambda *_: "gpt-2"

    monkeypatch.setattr(Converter, "_check", check)
    return converter()


def require_same_keys(traced: Any, reader: Any, without: tuple[str, ...] = ()) -> None:
    """Compare keys by order, type and value, except those in ``without``."""
    found = [(each.key, each.type, each.items, each.value) for each in traced.metadata]
    expected = keys_of(reader)
    found, expected = ([row for row in rows if row[0] not in without] for rows in (found, expected))
    assert [row[:3] for row in found] == [row[:3] for row in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert repr(mine[3]) == repr(theirs[3]), mine[0]


def require_same_tensors(traced: Any, reader: Any, target: Path) -> None:
    """Compare names, order, shapes and types of the recipes, and the bytes that they produce."""
    expected = [
        (each.name, tuple(int(size) for size in reversed(each.shape)), each.tensor_type.name)
        for each in reader.tensors
    ]
    assert [tuple(row) for row in traced.recipes.targets()] == expected
    loadstone.convert(traced.catalog, target, rules=traced, unexpected="ignore", threads=1)
    values = loadstone.load_file(target)
    for each in reader.tensors:
        raw = values[each.name].contiguous().reshape(-1).view(torch.uint8).numpy()
        assert raw.tobytes() == np.ascontiguousarray(each.data).tobytes(), each.name


def require_same_files(path: Path, own: Path, without: str = "") -> None:
    """Compare keys in any order, except those with the prefix ``without``, and all tensors."""
    found, expected = read(path), read(own)
    keys = [
        sorted(repr(row) for row in keys_of(each) if not without or not row[0].startswith(without))
        for each in (found, expected)
    ]
    assert keys[0] == keys[1]
    rows = [
        [(each.name, each.shape.tolist(), each.tensor_type, each.data.tobytes()) for each in one]
        for one in (found.tensors, expected.tensors)
    ]
    assert rows[0] == rows[1]


def read(path: Path) -> Any:
    return gguf.GGUFReader(path)
