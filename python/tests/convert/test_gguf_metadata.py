"""GGUF metadata keeps its types through safetensors, and general.file_type describes the output, at
every entry point that converts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from convert_doors import DOORS
from imatrix_files import write_dat
from safetensors import safe_open
from safetensors.numpy import save_file

import loadstone

Kind = gguf.GGMLQuantizationType
Type = gguf.GGUFValueType
TYPES_KEY = "loadstone.gguf_types"

# Limits of each type, and floats that need many digits.
VALUES: dict[Type, list[Any]] = {
    Type.UINT8: [0, 255],
    Type.INT8: [-128, 127],
    Type.UINT16: [0, 65535],
    Type.INT16: [-32768, 32767],
    Type.UINT32: [0, 2**32 - 1],
    Type.INT32: [-(2**31), 2**31 - 1],
    Type.UINT64: [0, 2**64 - 1],
    Type.INT64: [-(2**63), 2**63 - 1],
    Type.FLOAT32: [1e-6, 0.1, -0.0, 3.4028234e38, 1e-45, math.inf, -math.inf, math.nan],
    Type.FLOAT64: [1e-6, 0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, math.nan],
    Type.BOOL: [False, True],
    Type.STRING: ["", "7", "true", "nan", "a=u32 b=bool", "words of two lines\n\u00e9"],
}
CASES = [(kind, value) for kind, values in VALUES.items() for value in values]


def write(path: Path, entries: list[tuple[str, Any, Type]], kind: Kind = Kind.F32) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value, type_of_value in entries:
        writer.add_key_value(key, value, type_of_value)
    numbers = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
    writer.add_tensor("blk.0.ffn_up.weight", gguf.quantize(numbers, kind), raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(256, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def fields(path: Path) -> dict[str, tuple[Type, bytes]]:
    return {
        key: (field.types[0], b"".join(bytes(field.parts[index]) for index in field.data))
        for key, field in gguf.GGUFReader(path).fields.items()
        if not key.startswith("GGUF.")
    }


@pytest.mark.parametrize("door", DOORS)
def test_types_survive_safetensors(tmp_path: Path, door: str) -> None:
    entries = [(f"llama.key{i}", value, kind) for i, (kind, value) in enumerate(CASES)]
    source = write(tmp_path / "a.gguf", entries)
    DOORS[door](source, tmp_path / "b.safetensors")
    DOORS[door](tmp_path / "b.safetensors", tmp_path / "c.gguf")
    assert fields(tmp_path / "c.gguf") == fields(source)
    # Control: without the key for types, all values remain strings.
    with safe_open(tmp_path / "b.safetensors", "np") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert metadata.pop(TYPES_KEY)
    save_file(tensors, tmp_path / "d.safetensors", metadata)
    loadstone.convert(tmp_path / "d.safetensors", tmp_path / "d.gguf")
    bare = fields(tmp_path / "d.gguf")
    assert {bare[f"llama.key{i}"][0] for i in range(len(CASES))} == {Type.STRING}


TOKENS = "tokenizer.ggml.tokens"
# A key that safetensors cannot store, a file next to source or target, and True for a warning.
LOST: dict[str, tuple[str, str, bool]] = {
    "description": ("general.tags", "", False),
    "vocabulary": (TOKENS, "", True),
    "with another file": (TOKENS, "out/config.json", True),
    "with a tokenizer": (TOKENS, "out/tokenizer.model", False),
    "with a tokenizer that is copied": (TOKENS, "source/tokenizer.json", False),
}


@pytest.mark.parametrize("case", LOST)
@pytest.mark.parametrize("target", ["out/b.safetensors", "out"])
def test_a_vocabulary_that_safetensors_lose_is_a_warning(
    tmp_path: Path, case: str, target: str
) -> None:
    key, beside, is_lost = LOST[case]
    for folder in ("source", "out"):
        (tmp_path / folder).mkdir()
    write(tmp_path / "source" / "a.gguf", [(key, ["a", "b"], Type.ARRAY)])
    if beside:
        (tmp_path / beside).write_text("{}")
    # Only conversions to folders copy the file next to the source.
    is_lost |= beside.startswith("source") and target != "out"
    for dry_run in (True, False):
        report = loadstone.convert(tmp_path / "source", tmp_path / target, dry_run=dry_run)
        told = [each for each in report.findings if each.code == "convert.metadata"]
        assert all(each.sources == [key] for each in told)
        assert sorted(each.severity for each in told) == ["info"] + ["warning"] * is_lost
        assert any("copy tokenizer.json" in each.suggestion for each in told) == is_lost


@pytest.mark.parametrize("key", ["llama.attention.sliding_window_pattern", "tokenizer.ggml.merges"])
def test_settings_of_the_model_that_safetensors_lose_are_a_warning(
    tmp_path: Path, key: str
) -> None:
    write(tmp_path / "a.gguf", [(key, ["a", "b"], Type.ARRAY)])
    report = loadstone.convert(tmp_path / "a.gguf", tmp_path / "b.safetensors")
    (told,) = [each for each in report.findings if each.code == "convert.metadata"]
    assert told.severity == ("warning" if key.startswith("llama") else "info")
    assert told.sources == [key]
    assert key in told.message


def test_text_that_somebody_edits(tmp_path: Path) -> None:
    tensor = {"a.weight": np.ones((4, 4), np.float32)}
    metadata = {
        "general.architecture": "llama",
        "general.file_type": "0",  # GGUF fixes the type of this key
        "general.name": "12",
        "llama.block_count": "8",
        "llama.layers": "300",
        "llama.flag": "yes",
        "llama.scale": "1e39",
        "tokenizer.ggml.add_bos_token": "true",
        TYPES_KEY: "llama.block_count=u32 llama.layers=u8 llama.flag=bool llama.scale=f32 =u8 x",
    }
    save_file(tensor, tmp_path / "a.safetensors", metadata)
    report = loadstone.convert(tmp_path / "a.safetensors", tmp_path / "b.gguf")
    found = gguf.GGUFReader(tmp_path / "b.gguf").fields
    types = {key: field.types[0] for key, field in found.items() if not key.startswith("GGUF.")}
    assert types == {
        "general.architecture": Type.STRING,
        "general.file_type": Type.UINT32,
        "general.name": Type.STRING,
        "llama.block_count": Type.UINT32,
        "tokenizer.ggml.add_bos_token": Type.BOOL,
    }
    (named,) = [each for each in report.findings if each.code == "convert.metadata"]
    assert sorted(named.sources) == ["llama.flag", "llama.layers", "llama.scale"]


FileType = gguf.LlamaFileType

# Source encoding, declared file type, options, and expected file type (None if it is removed).
FILE_TYPES: dict[str, tuple[Kind, int, dict[str, Any], int | None]] = {
    "a copy keeps an odd one": (Kind.Q4_0, 15, {}, 15),
    "a copy of numbers": (Kind.F32, 0, {}, 0),
    "to bfloat16": (Kind.F32, 0, {"dtype": "bf16"}, FileType.MOSTLY_BF16),
    "to float16": (Kind.F32, 0, {"dtype": "f16"}, FileType.MOSTLY_F16),
    "to float32": (Kind.Q8_0, FileType.MOSTLY_Q8_0, {"dtype": "f32"}, FileType.ALL_F32),
    "decoded": (Kind.Q4_0, FileType.MOSTLY_Q4_0, {"dequantize": True}, FileType.MOSTLY_BF16),
    "quantized": (Kind.F32, 0, {"quantize": "q8_0", "include": "ffn_up"}, FileType.MOSTLY_Q8_0),
    "to a dtype without a file type": (Kind.F32, 0, {"dtype": "f64"}, None),
}


@pytest.mark.parametrize("way", ["straight", "by safetensors"])
@pytest.mark.parametrize("door", ["convert", "command"])
@pytest.mark.parametrize("case", FILE_TYPES)
def test_file_types_are_true(tmp_path: Path, case: str, door: str, way: str) -> None:
    kind, told, options, expected = FILE_TYPES[case]
    source = write(tmp_path / "a.gguf", [("general.file_type", told, Type.UINT32)], kind)
    target = tmp_path / "b.gguf"
    if way == "straight":
        DOORS[door](source, target, **options)
    elif "quantize" in options or not options:
        pytest.skip("safetensors store numbers")
    else:
        DOORS[door](source, tmp_path / "b.safetensors", **options)
        DOORS[door](tmp_path / "b.safetensors", target)
    found = gguf.GGUFReader(target).get_field("general.file_type")
    assert (None if found is None else found.contents()) == expected
    assert found is None or found.types == [Type.UINT32]


def test_a_given_file_type_stays(tmp_path: Path) -> None:
    source = write(tmp_path / "a.gguf", [("general.file_type", 15, Type.UINT32)])
    given = {"general.file_type": {"type": "u32", "value": 7}}
    loadstone.convert(source, tmp_path / "b.gguf", dtype="bfloat16", metadata=given)
    assert gguf.GGUFReader(tmp_path / "b.gguf").get_field("general.file_type").contents() == 7


IMATRIX = [
    ("quantize.imatrix.file", "old.imatrix", Type.STRING),
    ("quantize.imatrix.dataset", "old.txt", Type.STRING),
    ("quantize.imatrix.entries_count", 7, Type.UINT32),
    ("quantize.imatrix.chunks_count", 9, Type.UINT32),
]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("suffix", ["gguf", "safetensors"])
@pytest.mark.parametrize(
    "options",
    [{"quantize": "q4_1", "include": "ffn_up"}, {"dtype": "f32"}, {"dequantize": True}, {}],
    ids=str,
)
def test_a_matrix_is_named_as_long_as_its_blocks_are_there(
    options: dict[str, Any], suffix: str, door: str, tmp_path: Path
) -> None:
    if door == "merge" and ("dequantize" in options or not options):
        pytest.skip("a merge always decodes")
    if suffix == "safetensors" and "quantize" in options:
        pytest.skip("safetensors hold no blocks")
    source = write(tmp_path / "a.gguf", IMATRIX, Kind.Q4_0)
    target = tmp_path / f"b.{suffix}"
    DOORS[door](source, target, **options)
    named = [key for key in loadstone.inspect(target).metadata if "imatrix" in key]
    is_copy = suffix == "gguf" and not options  # control
    assert named == (sorted(key for key, *_ in IMATRIX) if is_copy else [])
    given = {"quantize.imatrix.file": "mine"}
    loadstone.convert(source, tmp_path / f"c.{suffix}", dtype="float32", metadata=given)
    found = loadstone.inspect(tmp_path / f"c.{suffix}").metadata
    assert {key: value for key, value in found.items() if "imatrix" in key} == given


def test_another_matrix_has_no_key_of_the_old_one(tmp_path: Path) -> None:
    source = write(tmp_path / "a.gguf", IMATRIX)
    columns = np.ones((1, 256), np.float32), np.ones(1, np.float32)
    entries = {"blk.0.ffn_up.weight": columns}
    matrix = write_dat(tmp_path / "new.dat", entries)
    loadstone.convert(
        source, tmp_path / "b.gguf", quantize="q4_0", include="ffn_up", imatrix=matrix
    )
    found = loadstone.inspect(tmp_path / "b.gguf").metadata
    assert "old" not in str([value for key, value in found.items() if "imatrix" in key])
    assert found["quantize.imatrix.entries_count"] == 1


def test_safetensors_have_no_word_about_the_source_file(tmp_path: Path) -> None:
    told = ("general.file_type", FileType.MOSTLY_Q4_0, Type.UINT32)
    source = write(tmp_path / "a.gguf", [told], Kind.Q4_0)
    (tmp_path / "parts").mkdir()
    loadstone.convert(source, tmp_path / "parts" / "s.gguf", shard_size=8_000)
    loadstone.convert(tmp_path / "parts" / "s-00001-of-00002.gguf", tmp_path / "b.safetensors")
    with safe_open(tmp_path / "b.safetensors", "np") as file:
        metadata = file.metadata()
    assert metadata["general.file_type"] == str(int(FileType.MOSTLY_BF16))
    assert metadata["general.architecture"] == "llama"  # control
    assert not any(key.startswith("split.") for key in metadata)
